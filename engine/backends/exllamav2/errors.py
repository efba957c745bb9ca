"""Why the library could not be imported, in one sentence that names what to do. Pure; no torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import (
    BackendUnavailable,
    EngineError,
    InsufficientMemory,
    ModelLoadFailed,
    UnsupportedModel,
    from_info,
)
from engine.system.install_command import pip_install

VERSION = "0.3.2"

_DISTRIBUTIONS = {"PIL": "pillow"}
_ENDS_OF_BUILDS = "; the other ways to its kernels are in `ericllm doctor`"


def explain_import(error: BaseException, *, torch_version: str, cuda_version: str) -> BackendUnavailable:
    """BackendUnavailable for what `import exllamav2` raised, under these versions of torch and of its CUDA."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or text).partition(".")[0]
        return _unavailable(_missing_module(name))
    if "undefined symbol" in text or isinstance(error, NameError):
        return _unavailable(
            f"the installed exllamav2_ext was built for another torch than {torch_version}; install the wheel of "
            f"exllamav2 {VERSION} that was built for it, or `{reinstall()}` to have it compiled here"
        )
    if "CUDA_HOME" in text:
        return _unavailable(
            f"exllamav2's kernels must be compiled, and there is no nvcc: install the CUDA {cuda_version} toolkit and "
            f"set CUDA_HOME to it, or install a wheel with kernels built for torch {torch_version}"
        )
    if "Ninja is required" in text:
        return _unavailable(f"exllamav2's kernels must be compiled, and ninja is missing: `{pip_install('ninja')}`")
    if versions := re.search(r"detected CUDA version \(([\d.]+)\).*?compile\s+PyTorch \(([\d.]+)\)", text, re.S):
        return _unavailable(
            f"nvcc is of CUDA {versions[1]} and torch of CUDA {versions[2]}: install the CUDA {versions[2]} toolkit "
            "and set CUDA_HOME to it"
        )
    if "Error building extension" in text:
        return _unavailable(f"exllamav2's kernels could not be compiled: {compiler_error(text)}{_ENDS_OF_BUILDS}")
    return _unavailable(f"exllamav2 could not be imported: {type(error).__name__}: {first_line(text)}")


def reinstall() -> str:
    """The command that puts the package in place of what is installed of it, without kernels."""
    return pip_install("--force-reinstall", "--no-deps", f"exllamav2=={VERSION}")


def not_installed() -> BackendUnavailable:
    """The package is not there at all."""
    return _unavailable(f"exllamav2 is not installed: `{_install()}`")


def other_version(found: str) -> BackendUnavailable:
    """A release that this backend does not know inside out, which it has to."""
    return _unavailable(f"exllamav2 {found} is installed, and this backend is written for {VERSION}: `{_install()}`")


def compiler_error(log: str) -> str:
    """The first line of a build's output that is an error, or what says that a program is missing."""
    lines = [line.strip() for line in log.splitlines()]
    for sign in ("not found", "fatal error", "error:", "FAILED"):
        for line in lines:
            if sign in line and not line.startswith("Error building extension"):
                return line[:300]
    return first_line(log)


def first_line(text: str) -> str:
    """The first line with anything in it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def _missing_module(name: str) -> str:
    if name == "exllamav2":
        return f"exllamav2 is not installed: `{_install()}`"
    return (
        f"exllamav2 needs the Python package {name}, which is not installed: "
        f"`{pip_install(_DISTRIBUTIONS.get(name, name))}`"
    )


def _install() -> str:
    return pip_install(f"exllamav2=={VERSION}")


def _unavailable(message: str) -> BackendUnavailable:
    return BackendUnavailable(message, param="backend", value="exllamav2")


# What the library's exceptions during a load mean, as errors of ours. Pure; no torch here.

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """Memory that a load needed, and memory that was free, for its error messages.

    other_bytes: work buffers and reserves, estimated.  split: whether gpu_split was given.
    """

    name: str
    devices: str
    weights_bytes: int = 0
    cache_bytes: int = 0
    other_bytes: int = 0
    free_bytes: int = 0
    split: bool = False


def explain_load(error: Exception, numbers: LoadNumbers) -> EngineError:
    """The error to raise for `error`: always a new one, so that no traceback keeps tensors alive."""
    if isinstance(error, EngineError):
        return from_info(error.info)
    text = str(error).replace("##", "").strip()
    if _is_out_of_memory(error, text):
        return _does_not_fit(numbers)
    if text.startswith("Could not find"):
        return UnsupportedModel(f"{numbers.name} is not complete: {_lower(first_line(text))}")
    if isinstance(error, AssertionError):
        return ModelLoadFailed(f"exllamav2 refuses {numbers.name}: {first_line(text)}")
    return ModelLoadFailed(f"exllamav2 could not load {numbers.name}: {type(error).__name__}: {first_line(text)}")


def _is_out_of_memory(error: Exception, text: str) -> bool:
    signs = (
        "Insufficient VRAM",
        "Insufficient space in device allocation",
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "HIP out of memory",
    )
    return type(error).__name__ == "OutOfMemoryError" or any(sign in text for sign in signs)


def _does_not_fit(numbers: LoadNumbers) -> InsufficientMemory:
    needed = numbers.weights_bytes + numbers.cache_bytes + numbers.other_bytes
    advice = (
        "gpu_split has to leave room for the cache and for work buffers"
        if numbers.split
        else "a smaller KV cache, one of fewer bits or a smaller max_model_len takes less"
    )
    return InsufficientMemory(
        f"{numbers.name} does not fit on {numbers.devices}: weights {numbers.weights_bytes // _MIB} MiB, KV cache "
        f"{numbers.cache_bytes // _MIB} MiB, work buffers and reserve about {numbers.other_bytes // _MIB} MiB, of "
        f"{numbers.free_bytes // _MIB} MiB free; {advice}",
        device=numbers.devices,
        needed_bytes=needed,
        free_bytes=numbers.free_bytes,
        short_bytes=max(0, needed - numbers.free_bytes),
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
