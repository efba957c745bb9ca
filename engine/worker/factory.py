"""Which backend computes a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engine.backends.base import Backend
from engine.config import ModelSpec
from engine.errors import InvalidRequest, UnsupportedModel

BackendFactory = Callable[[ModelSpec], Backend]


def create_backend(spec: ModelSpec) -> Backend:
    """The backend for `spec`, imported only now: torch is heavy, and only the worker that uses it pays.

    Raises what `refuse_unavailable` raises.
    """
    refuse_unavailable(spec)
    from engine.backends.torch.backend import TorchBackend

    return TorchBackend()


def refuse_unavailable(spec: ModelSpec) -> None:
    """Raise InvalidRequest where the backend that was asked for is not there, UnsupportedModel for EXL2 weights."""
    if is_exl2(spec.path):
        raise UnsupportedModel(
            f"{spec.name} holds EXL2 weights, which need an exllamav2 backend on CUDA; this version reads unquantised "
            "safetensors (bfloat16, float16, float32)",
            model=spec.name,
        )
    if spec.backend == "exllamav2":
        raise InvalidRequest(
            "--backend exllamav2 is not available: this version computes with the torch backend alone",
            param="backend",
            value=spec.backend,
        )


def is_exl2(folder: Path) -> bool:
    """Whether config.json says that the weights are EXL2. An unreadable one says nothing: the load will."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return bool(config["quantization_config"]["quant_method"] == "exl2")
    except (OSError, ValueError, KeyError, TypeError):
        return False
