"""What a model folder will ask for, read from its config and its files' sizes before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.config import ModelSpec
from engine.errors import UnsafeWeights, UnsupportedModel
from engine.models.files import read_json_object
from engine.models.inspect import inspect

LEAST_KV_TOKENS = 2048
"""A worker's KV pages should hold at least one request of this length, or of the whole context where that is less."""

WORKING_BYTES = 256 * 2**20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class MemoryDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one worker needs at the least. working_bytes: activations and the runtime itself."""

    weights_bytes: int
    kv_bytes: int
    working_bytes: int = WORKING_BYTES

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.working_bytes


def read_demand(spec: ModelSpec) -> MemoryDemand:
    """What a worker needs for `spec`; raises UnsupportedModel or UnsafeWeights for a folder that cannot be a model."""
    config = read_config(spec.path)
    stored = str(config.get("torch_dtype") or config.get("dtype") or "")
    stored_bytes = _DTYPE_BYTES.get(stored, 2)
    wanted_bytes = _DTYPE_BYTES.get(spec.dtype, stored_bytes)
    context = spec.max_model_len or config.get("max_position_embeddings")
    least = min(LEAST_KV_TOKENS, context) if isinstance(context, int) else LEAST_KV_TOKENS
    tokens = spec.kv_cache_tokens or least
    return MemoryDemand(
        weights_bytes=_weights_bytes(spec, config, stored_bytes, wanted_bytes),
        kv_bytes=int(tokens * kv_bytes_per_token(config, wanted_bytes) * _cache_share(spec)),
    )


def _weights_bytes(spec: ModelSpec, config: Mapping[str, object], stored_bytes: int, wanted_bytes: int) -> int:
    """exllamav2 computes with the weights as the files pack them; torch unpacks them to plain numbers."""
    packed = "quantization_config" in config
    if packed and spec.backend == "torch":
        return inspect(spec.path).parameters * wanted_bytes
    file_bytes = sum(file.stat().st_size for file in spec.path.glob("*.safetensors"))
    return file_bytes if packed else file_bytes * wanted_bytes // stored_bytes


def _cache_share(spec: ModelSpec) -> float:
    """Of the memory of an unquantised cache; the packed ones carry a scale of two bytes per 32 elements."""
    return 1.0 if spec.cache_bits == 16 else (spec.cache_bits + 0.5) / 16


def read_config(folder: Path) -> Mapping[str, object]:
    """The folder's config.json; raises UnsupportedModel where there is none, UnsafeWeights where all weights are
    pickles."""
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json, so it is no Hugging Face model folder")
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles and not any(folder.glob("*.safetensors")):
        raise UnsafeWeights(
            f"the weights in {folder} are pickles ({pickles[0]}), which can run code when read; "
            "convert them to safetensors",
            file=pickles[0],
        )
    return read_json_object(folder / "config.json")


def kv_bytes_per_token(config: Mapping[str, object], dtype_bytes: int) -> int:
    """Bytes of keys and values of one token over all layers; 0 where the config does not say."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    heads = sizes.get("num_attention_heads", 0)
    head_dim = sizes.get("head_dim") or (sizes.get("hidden_size", 0) // heads if heads else 0)
    return 2 * sizes.get("num_hidden_layers", 0) * sizes.get("num_key_value_heads", heads) * head_dim * dtype_bytes
