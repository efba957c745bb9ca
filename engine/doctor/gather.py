"""Gathering the facts: reads the machine here and asks about libraries in child processes, several at a time."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import platformdirs

from engine.backends.paged_attention.choose import AttentionFacts, choose
from engine.backends.torch.native.available import read_native
from engine.config import AttentionName
from engine.devices import cpu_name, usable_cores
from engine.doctor.child import ProbeFailed, ask
from engine.doctor.facts import Attention, Cpu, Exllama, Facts, Package, Torch
from engine.doctor.gpus import read_gpus
from engine.doctor.native import native_attention_problem
from engine.doctor.toolchain import package_manager, read_toolchain
from engine.doctor.wheels import numbers
from engine.errors import InvalidRequest
from engine.processor import cpu_flags
from engine.ram import read_ram

IMPORT_TIMEOUT_S = 90.0
"""For one library: importing torch from a cold network disk takes most of a minute."""

EXLLAMA_NEEDS = ("safetensors", "tokenizers", "numpy", "rich", "PIL")
"""What `import exllamav2, exllamav2.generator` imports besides torch."""

S = TypeVar("S", bound=msgspec.Struct)
P = TypeVar("P", bound=Package)


class Asking(Protocol):
    """`child.ask` with its timeout given."""

    def __call__(self, answer: type[S], probe: str, *arguments: str) -> S: ...


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
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="doctor") as pool:
        try:
            return _gathered(pool, asking, attention)
        except BaseException:  # a Ctrl-C: the pool would wait for its probes
            given_up.set()
            raise


def _gathered(pool: Executor, asking: Asking, attention: AttentionName) -> Facts:
    asked = partial(_asked, asking)
    torch = pool.submit(asked, Torch, "torch", "torch")
    flash_attn = pool.submit(asked, Package, "flash_attn", "package", "flash_attn")
    triton = pool.submit(asked, Package, "triton", "package", "triton")
    exllama = pool.submit(_exllama, asked)
    cpu, native = read_cpu(), read_native()
    problem = native_attention_problem(platform.machine(), cpu, native)
    tried = pool.submit(_attention, attention, problem, torch, asking)
    driver, gpus = read_gpus()
    return Facts(
        python=sys.version_info[:3],
        machine=platform.machine(),
        site_packages=sysconfig.get_path("platlib"),
        kernel_cache=str(platformdirs.user_cache_path("ericllm") / "kernels"),
        package_manager=package_manager(),
        cpu=cpu,
        driver=driver,
        gpus=gpus,
        toolchain=read_toolchain(),
        native=native,
        ray=Package(installed=is_installed("ray"), version=version_of("ray")),
        torch=torch.result(),
        exllama=exllama.result(),
        flash_attn=flash_attn.result(),
        triton=triton.result(),
        attention=tried.result(),
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


def is_installed(module: str) -> bool:
    """Whether `import module` would find something; imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_of(distribution: str) -> str:
    """The installed version, "" where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _asked(asking: Asking, kind: type[P], module: str, probe: str, *arguments: str) -> P:
    """The probe's answer about an installed module; a failing probe is the module's error."""
    if not is_installed(module):
        return kind()
    try:
        found = asking(kind, probe, *arguments)
    except ProbeFailed as failure:
        found = kind(installed=True, error=str(failure))
    return msgspec.structs.replace(found, version=found.version or version_of(module))


def _exllama(asked: Callable[..., Exllama]) -> Exllama:
    """exllamav2, and what it imports that is not installed."""
    if not is_installed("exllamav2"):
        return Exllama()
    missing = tuple(name for name in EXLLAMA_NEEDS if not is_installed(name))
    return msgspec.structs.replace(asked(Exllama, "exllamav2", "exllama"), missing_modules=missing)


def _attention(wanted: AttentionName, native_problem: str, torch: Future[Torch], asking: Asking) -> Attention:
    """Decided here where torch sees no GPU, tried on each of them where it does."""
    try:
        if torch.result().gpus:
            return asking(Attention, "attention", wanted)
        version = numbers(torch.result().version)
        choice = choose(wanted, AttentionFacts(capability=None, torch=version, native_problem=native_problem))
    except ProbeFailed as failure:
        return Attention(error=f"trying it on the GPUs: {failure}")
    except InvalidRequest as refusal:
        return Attention(error=refusal.message)
    return Attention(name=choice.name, reason=choice.reason)
