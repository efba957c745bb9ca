"""Gathering the facts: reads the machine here and asks about libraries in child processes, several at a time."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from engine.config import AttentionName
from engine.devices import cpu_name, usable_cores, visible_devices
from engine.doctor.facts import Cpu, Driver, DriverState, Facts, Gpu, Package, PackageManager, Toolchain
from engine.doctor.inspection import Asking, Inspection, backend_doctors, is_installed, version_of
from engine.doctor.probe import ask
from engine.system.child_process import child_environment
from engine.system.memory import read_ram
from engine.system.processor import cpu_flags

# The NVIDIA driver and its GPUs, read through NVML: no CUDA context is made and torch is not needed.

T = TypeVar("T")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
PCI_DEVICES = Path("/sys/bus/pci/devices")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def read_gpus(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[Driver, tuple[Gpu, ...]]:
    """The driver, and the GPUs that CUDA may use in its order. nvml: the pynvml module; None imports it."""
    nvml = nvml if nvml is not None else importlib.import_module("pynvml")
    place = Driver(card=has_card(), container=any(mark.exists() for mark in CONTAINER_MARKS))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return msgspec.structs.replace(place, state=_state(nvml, error), detail=str(error)), ()
    handles = _handles(nvml)
    visible = _visible(nvml, handles, environ.get("CUDA_VISIBLE_DEVICES"))
    driver = msgspec.structs.replace(
        place,
        state="ok",
        version=_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
        cuda=_cuda(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0),
        hidden=0 if visible else len(handles),
    )
    gpus = tuple(gpu for gpu in (_gpu(nvml, handle) for handle in visible) if gpu is not None)
    return driver, gpus


def has_card(folder: Path = PCI_DEVICES) -> bool:
    """Return whether the PCI bus holds an NVIDIA display adapter."""
    try:
        devices = list(folder.iterdir())
    except OSError:
        return False
    return any(
        _content(device / "vendor") == NVIDIA_VENDOR and _content(device / "class").startswith(DISPLAY_CLASS)
        for device in devices
    )


def _state(nvml: Any, error: Any) -> DriverState:
    """Which of NVML's ways to fail this is."""
    states: dict[int, DriverState] = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "absent",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatched",
    }
    return states.get(error.value, "failing")


def _handles(nvml: Any) -> list[Any]:
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = (_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
    return [handle for handle in handles if handle is not None]


def _visible(nvml: Any, handles: list[Any], setting: str | None) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES leaves, or the slices of a MIG GPU that it names."""
    if setting is not None and "MIG-" in setting:
        slices = (_ask(nvml, nvml.nvmlDeviceGetHandleByUUID, name.strip()) for name in setting.split(","))
        return [handle for handle in slices if handle is not None]
    uuids = [_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "") for handle in handles]
    return [handles[index] for index in visible_devices(setting, uuids)]


def _gpu(nvml: Any, handle: Any) -> Gpu | None:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _ask(nvml: Any, question: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _cuda(number: int) -> str:
    """13020 -> "13.2"; 0 -> ""."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


# What is here to compile CUDA extensions with, looked for where torch.utils.cpp_extension looks.

HEADERS = ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h", "curand.h")
DEFAULT_CUDA = Path("/usr/local/cuda")
TIMEOUT_S = 20.0
_RELEASE = re.compile(r"release (\d+\.\d+)")
_VERSION = re.compile(r"(\d+\.\d+(?:\.\d+)?)")
_MANAGERS: tuple[tuple[str, PackageManager], ...] = (
    ("apt-get", "apt"),
    ("dnf", "dnf"),
    ("zypper", "zypper"),
    ("pacman", "pacman"),
)


def read_toolchain(environ: Mapping[str, str] = os.environ) -> Toolchain:
    """All of it. Runs `nvcc --version` and the compiler's."""
    nvcc = find_nvcc(environ)
    compiler = shutil.which(environ.get("CXX") or "c++", path=environ.get("PATH")) or ""
    output, complaint = _output_of(nvcc)
    release = _RELEASE.search(output)
    missing = missing_headers(nvcc, environ) if nvcc else ()
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=release.group(1) if release else "",
        nvcc_error="" if release or not nvcc else complaint or "its version is unknown",
        compiler=compiler,
        compiler_version=compiler_version(_output_of(compiler)[0]),
        ninja=shutil.which("ninja", path=environ.get("PATH")) or "",
        ninja_off_path=shutil.which("ninja", path=str(Path(sys.executable).parent)) or "",
        python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        missing_headers=missing,
        other_toolkit=other_toolkit(missing) if missing else "",
    )


def find_nvcc(environ: Mapping[str, str]) -> str:
    """CUDA_HOME's (or CUDA_PATH's), that of PATH, or that of /usr/local/cuda; "" where none is."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        return shutil.which(str(Path(home, "bin", "nvcc"))) or ""
    return shutil.which("nvcc", path=environ.get("PATH")) or shutil.which(str(DEFAULT_CUDA / "bin" / "nvcc")) or ""


def compiler_version(output: str) -> str:
    """ "g++ 12.2.0" or "clang++ 18.1" from the output of `c++ --version`; "" from nothing."""
    first = output.partition("\n")[0]
    found = _VERSION.findall(first)
    return f"{'clang++' if 'clang' in first else 'g++'} {found[-1]}" if found else ""


def missing_headers(nvcc: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those of HEADERS that the build would find neither in the toolkit nor in the nvidia-* packages of torch."""
    folders = list(_searched(nvcc, environ))
    return tuple(header for header in HEADERS if not any((folder / header).is_file() for folder in folders))


def other_toolkit(headers: Sequence[str], parent: Path = DEFAULT_CUDA.parent) -> str:
    """The newest toolkit next to the default one that has all of `headers`, "" where none does."""
    toolkits = sorted(parent.glob("cuda*"), reverse=True)
    return next((str(kit) for kit in toolkits if all((kit / "include" / name).is_file() for name in headers)), "")


def _searched(nvcc: str, environ: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or Path(nvcc).parent.parent)
    yield home / "include"
    yield from home.glob("targets/*/include")
    yield from Path(sysconfig.get_path("purelib"), "nvidia").glob("*/include")
    yield Path(environ.get("CUDA_INC_PATH") or "/usr/include")
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        yield from (Path(entry) for entry in environ.get(variable, "").split(os.pathsep) if entry)


def _output_of(program: str) -> tuple[str, str]:
    """Return the output of `program --version`, and the last line of its complaint."""
    if not program:
        return "", ""
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            env=child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, (done.stderr.strip().splitlines() or [""])[-1]


IMPORT_TIMEOUT_S = 90.0
"""For one library: importing torch from a cold network disk takes most of a minute."""


def gather(
    *,
    attention: AttentionName = "auto",
    timeout_s: float = IMPORT_TIMEOUT_S,
    cancelled: Callable[[], bool] = lambda: False,
) -> Facts:
    """Look at everything. Blocks for seconds; a probe that takes longer than `timeout_s` is reported as such.

    `cancelled` ends the probes under way within a moment; what they were to say is then missing from the facts.
    """
    given_up = threading.Event()
    asking = partial(ask, timeout_s=timeout_s, cancelled=lambda: given_up.is_set() or cancelled())
    with ThreadPoolExecutor(max_workers=2 * len(backend_doctors()) + 2, thread_name_prefix="doctor") as pool:
        try:
            return _gathered(pool, asking, attention)
        except BaseException:  # a Ctrl-C: the pool would wait for its probes
            given_up.set()
            raise


def _gathered(pool: Executor, ask: Asking, attention: AttentionName) -> Facts:
    cpu = read_cpu()
    inspection = Inspection(pool, ask, attention=attention, cpu=cpu)
    backends = [pool.submit(doctor.gather, inspection) for doctor in backend_doctors().values()]
    driver, gpus = read_gpus()
    return Facts(
        python=sys.version_info[:3],
        machine=platform.machine(),
        site_packages=sysconfig.get_path("platlib"),
        kernel_cache=str(platformdirs.user_cache_path("ericllm") / "kernels"),
        package_manager=next((name for program, name in _MANAGERS if shutil.which(program)), ""),
        cpu=cpu,
        driver=driver,
        gpus=gpus,
        toolchain=read_toolchain(),
        ray=Package(installed=is_installed("ray"), version=version_of("ray")),
        torch=inspection.torch.result(),
        backends=tuple(backend.result() for backend in backends),
    )


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """The processor and the RAM."""
    ram = read_ram()
    return Cpu(
        name=cpu_name(cpuinfo),
        cores=usable_cores(),
        flags=cpu_flags(cpuinfo),
        ram_total_bytes=ram.total_bytes,
        ram_free_bytes=ram.free_bytes,
    )
