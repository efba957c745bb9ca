"""Why the library could not be imported, in one sentence that names what to do. Pure; no torch here."""

from __future__ import annotations

import re

from engine.errors import BackendUnavailable
from engine.installing import pip_install

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
