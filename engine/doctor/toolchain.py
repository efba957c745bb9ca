"""What is here to compile CUDA extensions with, looked for where torch.utils.cpp_extension looks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.child_process import child_environment
from engine.doctor.facts import PackageManager, Toolchain

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
    said, complaint = _said(nvcc)
    release = _RELEASE.search(said)
    missing = missing_headers(nvcc, environ) if nvcc else ()
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=release.group(1) if release else "",
        nvcc_error="" if release or not nvcc else complaint or "it does not say its version",
        compiler=compiler,
        compiler_version=compiler_version(_said(compiler)[0]),
        ninja=shutil.which("ninja", path=environ.get("PATH")) or "",
        ninja_off_path=shutil.which("ninja", path=_scripts()) or "",
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


def compiler_version(said: str) -> str:
    """ "g++ 12.2.0" or "clang++ 18.1" from what `c++ --version` says; "" from nothing."""
    first = said.partition("\n")[0]
    found = _VERSION.findall(first)
    return f"{'clang++' if 'clang' in first else 'g++'} {found[-1]}" if found else ""


def missing_headers(nvcc: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those of HEADERS that the build would find neither in the toolkit nor in the nvidia-* packages of torch."""
    folders = list(_searched(nvcc, environ))
    return tuple(header for header in HEADERS if not any((folder / header).is_file() for folder in folders))


def other_toolkit(headers: Sequence[str], parent: Path = DEFAULT_CUDA.parent) -> str:
    """The newest toolkit beside the default one that has all of `headers`, "" where none does."""
    toolkits = sorted(parent.glob("cuda*"), reverse=True)
    return next((str(kit) for kit in toolkits if all((kit / "include" / name).is_file() for name in headers)), "")


def package_manager() -> PackageManager:
    """The system's, "" where it has none that we know."""
    return next((name for program, name in _MANAGERS if shutil.which(program)), "")


def _searched(nvcc: str, environ: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or Path(nvcc).parent.parent)
    yield home / "include"
    yield from home.glob("targets/*/include")
    yield from Path(sysconfig.get_path("purelib"), "nvidia").glob("*/include")
    yield Path(environ.get("CUDA_INC_PATH") or "/usr/include")
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        yield from (Path(entry) for entry in environ.get(variable, "").split(os.pathsep) if entry)


def _scripts() -> str:
    """Where programs of this interpreter's packages lie, on PATH or not."""
    return str(Path(sys.executable).parent)


def _said(program: str) -> tuple[str, str]:
    """What `program --version` says on stdout, and the last line of its complaint."""
    if not program:
        return "", ""
    command = [program, "--version"]
    try:
        done = subprocess.run(
            command,
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
