"""Choice of the backend that computes a model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from engine.backends.base import Backend
from engine.config import BackendKind, ModelSpec
from engine.errors import BackendUnavailable, UnsupportedModel
from engine.models.files import read_json_object
from engine.system.install_command import install_extra, pip_install

BackendFactory = Callable[[ModelSpec], Backend]


def create_backend(spec: ModelSpec) -> Backend:
    """Create the backend for `spec`, imported only now: torch is heavy, and only the worker that uses it pays.

    Raises BackendUnavailable where `spec` names one that cannot run here.
    """
    kind = resolve_backend(spec)
    refuse_unavailable(kind)
    if kind == "exllamav2":
        from engine.backends.exllamav2.backend import ExllamaBackend

        return ExllamaBackend()
    from engine.backends.torch.backend import TorchBackend

    return TorchBackend()


def resolve_backend(spec: ModelSpec) -> BackendKind:
    """Return the backend that `spec` names. "auto" is exllamav2 for EXL2 weights where it can run, else torch, which
    reads EXL2 weights too but computes with them in plain floats."""
    if spec.backend != "auto":
        return spec.backend
    return "exllamav2" if is_exl2(spec.path) and exllamav2_lacks() is None else "torch"


def refuse_unavailable(kind: BackendKind) -> None:
    """Raise BackendUnavailable, naming what the backend lacks on this machine."""
    lack = exllamav2_lacks() if kind == "exllamav2" else None
    if lack is not None:
        raise BackendUnavailable(
            f"--backend exllamav2 cannot run here: {lack} (details: `ericllm doctor`)", param="backend", value=kind
        )
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable(
            f"torch is not installed; `{pip_install('torch')}` installs it (details: `ericllm doctor`)",
            param="backend",
            value=kind,
        )


def exllamav2_lacks() -> str | None:
    """Return what this machine lacks for exllamav2, or None. Imports neither it nor torch, both of which are heavy."""
    if importlib.util.find_spec("exllamav2") is None:
        return f"exllamav2 is not installed; `{install_extra('cuda')}` installs it"
    from engine.devices import NvmlProbe

    return None if NvmlProbe().read() else "it computes on NVIDIA GPUs, and none was found"


def is_exl2(folder: Path) -> bool:
    """Return whether config.json says that the weights are EXL2. An unreadable one does not: the load reports it."""
    try:
        quantisation = read_json_object(folder / "config.json").get("quantization_config")
    except UnsupportedModel:
        return False
    return isinstance(quantisation, dict) and quantisation.get("quant_method") == "exl2"
