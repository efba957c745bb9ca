"""Choice of the backend that computes a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.backends.base import Backend
from engine.backends.common.exllamav2_checkpoint import read_folder
from engine.config import BackendKind, ModelSpec
from engine.errors import BackendUnavailable, EngineError, UnsupportedModel
from engine.models.files import read_json_object
from engine.system.install_command import install_extra, pip_install

BackendFactory = Callable[[ModelSpec], Backend]

_OF_METHOD: Mapping[str, BackendKind] = {"exl2": "exllamav2", "gptq": "exllamav2", "exl3": "exllamav3"}
_INSTALLS: Mapping[BackendKind, Callable[[], str]] = {
    "exllamav2": lambda: install_extra("cuda"),
    "exllamav3": lambda: install_extra("exl3"),
}


def create_backend(spec: ModelSpec) -> Backend:
    """Create the backend for `spec`, imported only now: torch is heavy, and only the worker that uses it pays.

    Raises BackendUnavailable where `spec` names one that cannot run here.
    """
    kind = resolve_backend(spec)
    refuse_unavailable(kind)
    if kind == "exllamav2":
        from engine.backends.exllamav2.backend import ExllamaBackend

        return ExllamaBackend()
    if kind == "exllamav3":
        from engine.backends.exllamav3.backend import Exllama3Backend

        return Exllama3Backend()
    from engine.backends.torch.backend import TorchBackend

    return TorchBackend()


def resolve_backend(spec: ModelSpec) -> BackendKind:
    """Return the backend that `spec` names. "auto" is `backend_of_format`."""
    if spec.backend != "auto":
        return spec.backend
    return backend_of_format(_quantisation_method(spec.path), spec.path)


def backend_of_format(quantisation: str, path: Path) -> BackendKind:
    """Return the backend for the model at `path`, whose weights have a quantisation, "exl2 4.0 bpw" say: exllamav2 for
    EXL2 and for the GPTQ that it reads, and exllamav3 for EXL3, where they can run; else torch, which reads all of
    them."""
    for method, backend in _OF_METHOD.items():
        if quantisation.startswith(method) and library_lacks(backend) is None:
            return backend if method != "gptq" or _is_read_by_exllamav2(path) else "torch"
    return "torch"


def _is_read_by_exllamav2(path: Path) -> bool:
    """Return whether its layout of the weights, and the model's architecture, are among those of exllamav2."""
    try:
        read_folder(path)
    except (EngineError, OSError):
        return False
    return True


def refuse_unavailable(kind: BackendKind) -> None:
    """Raise BackendUnavailable, naming what the backend lacks on this machine."""
    lack = library_lacks(kind) if kind != "torch" else None
    if lack is not None:
        raise BackendUnavailable(
            f"--backend {kind} cannot run here: {lack} (details: `ericllm doctor`)", param="backend", value=kind
        )
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable(
            f"torch is not installed; `{pip_install('torch')}` installs it (details: `ericllm doctor`)",
            param="backend",
            value=kind,
        )


def library_lacks(backend: BackendKind) -> str | None:
    """Return what this machine lacks for the library of that name, or None. Imports neither it nor torch, both of which
    are heavy."""
    if importlib.util.find_spec(backend) is None:
        return f"{backend} is not installed; `{_INSTALLS[backend]()}` installs it"
    from engine.devices import NvmlProbe

    return None if NvmlProbe().read() else "it computes on NVIDIA GPUs, and none was found"


def _quantisation_method(folder: Path) -> str:
    """Return what config.json says of how the weights are packed. An unreadable one says nothing: the load reports
    it."""
    try:
        quantisation = read_json_object(folder / "config.json").get("quantization_config")
    except UnsupportedModel:
        return ""
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else ""
    return method if isinstance(method, str) else ""
