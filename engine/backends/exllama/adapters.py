"""LoRA adapters: what a folder holds, whether the library would honour all of it, and applying it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.exllama.sizes import stored_bytes
from engine.config import quoted
from engine.errors import InvalidRequest, UnsafeWeights, UnsupportedModel
from engine.models.files import read_json_object, refuse_links
from engine.models.headers import TensorHeader, read_header

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_OVERLOOKED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias")
"""Keys of PEFT's config that change what is computed and that the library ignores or fails on."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on disk that can be applied. weights_bytes: what it takes on the GPUs, about."""

    config: Path
    weights: Path
    weights_bytes: int


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`. Raises UnsafeWeights for a pickle, UnsupportedModel for what could not be honoured."""
    try:
        refuse_links(folder)
    except OSError as error:
        raise UnsupportedModel(f"{folder} cannot be read: {error.strerror}") from error
    weights = folder / _WEIGHTS
    if not weights.is_file():
        if (folder / _PICKLE).is_file():
            raise UnsafeWeights(
                f"{_PICKLE} is a pickle, which can run code when read; convert the adapter to safetensors", file=_PICKLE
            )
        raise UnsupportedModel(f"{folder} holds no LoRA adapter: it has no {_WEIGHTS}")
    config = read_json_object(folder / _CONFIG)
    if not config:
        raise UnsupportedModel(f"{folder} holds no LoRA adapter: it has no {_CONFIG}")
    _refuse_overlooked(config)
    tensors = read_header(weights)
    _refuse_unpaired(tensors)
    return Adapter(folder / _CONFIG, weights, stored_bytes(tensors))


def load_adapter(lora: Any, model: Any, adapter: Adapter) -> Any:
    """The library's object (`lora` is its class) for `adapter` on `model`.

    Its own way to find the files would prefer a pickle. Raises UnsupportedModel where it does not fit the model.
    """
    if model.config.arch.lm.residual_stream_fp32:
        raise UnsupportedModel(f"exllamav2 applies no LoRA adapter to {model.config.architecture}")
    try:
        return lora(model, str(adapter.config), str(adapter.weights))
    except KeyError as error:
        missing = str(error.args[0]) if error.args else "a layer"
    raise UnsupportedModel(f"the LoRA adapter does not fit the model, which has no {missing}")


def _refuse_unpaired(tensors: Mapping[str, TensorHeader]) -> None:
    """Raise UnsupportedModel for factors that share no rank: the library's kernels go by that of one of them."""
    modules = {name.removesuffix(each) for name in tensors for each in _FACTORS if name.endswith(each)}
    for module in sorted(modules):
        a, b = (tensors.get(module + each) for each in _FACTORS)
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise UnsupportedModel(
                f"the factors of {quoted(module)} in {_WEIGHTS} share no rank", module=quoted(module)
            )


def _refuse_overlooked(config: Mapping[str, object]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is {quoted(kind)}; exllamav2 applies LORA alone")
    for key in _OVERLOOKED:
        if config.get(key):
            raise UnsupportedModel(f"the adapter sets {key} in {_CONFIG}, which exllamav2 does not honour")
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise InvalidRequest(f"{key} in {_CONFIG} is {quoted(value)}; it must be a number above 0", param="lora")
