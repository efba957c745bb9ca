"""config.json as a frozen, checked value. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeGuard, get_args

from engine.backends.common.config_values import (
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TOKENS,
    number,
    positive,
    refusal,
    refuse_more,
    source_of,
)
from engine.backends.common.families import architectures
from engine.backends.common.families.base import Architecture, RawConfig, Traits
from engine.backends.common.quant_config import Quantisation, read_quantisation
from engine.backends.common.rope_config import RopeConfig, read_ropes
from engine.config import quote_value
from engine.errors import InvalidRequest, UnsupportedModel
from engine.models.config_json import read_config
from engine.models.files import is_file

# The context length that a model is loaded with, whichever backend computes it.


def context_length(asked: int | None, usual: int, longest: int) -> int:
    """Tokens: as asked for, else the usual. Raises InvalidRequest for what is more than the longest, or nothing."""
    length = usual if asked is None else asked
    if not 1 <= length <= longest:
        raise InvalidRequest(
            f"max_model_len is {length}; this model takes from 1 to {longest} tokens "
            "(alpha_value and compress_pos_emb extend it)",
            param="max_model_len",
            value=length,
            limit=longest,
        )
    return length


CheckpointDtype = Literal["bfloat16", "float16", "float32"]
Activation = Literal["silu", "gelu", "gelu_tanh"]

_MAX_END_TOKENS = 1000

_SHOWN = 5
"""Of the architectures that a config.json names, in a message."""

_ACTIVATIONS: Mapping[object, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks of tensor parallelism, each of which has a part of every layer.

    first_kv_head: the first of the model's key heads that it has.
    """

    rank: int = 0
    size: int = 1
    first_kv_head: int = 0


WHOLE_MODEL = Shard()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a model and how long a context it takes. Sizes are in elements, lengths in tokens.

    rope: of all layers, or of those without a window where the others have `local_rope`.
    quantisation: what config.json says of it; None where it says nothing, though weights may be quantised still.
    shard: the rank whose heads and intermediate sizes these are (see `sharding.shard_config`).
    """

    architecture: str
    traits: Traits
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: CheckpointDtype
    quantisation: Quantisation | None = None
    activation: Activation = "silu"
    local_rope: RopeConfig | None = None
    shard: Shard = WHOLE_MODEL

    @property
    def vocab_rows(self) -> range:
        """Rows of the embedding and of the head that the shard has."""
        rows = -(-self.vocab_size // self.shard.size)
        first = min(self.vocab_size, self.shard.rank * rows)
        return range(first, min(self.vocab_size, first + rows))

    @property
    def score_scale(self) -> float:
        """Factor of the dot product of a query and a key."""
        return self.head_dim**-0.5 if self.traits.score_scale is None else self.traits.score_scale

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return how a layer rotates queries and keys; None where it does not."""
        if layer in self.traits.no_rope_layers:
            return None
        local = self.local_rope is not None and self.traits.windows[layer] is not None
        return self.local_rope if local else self.rope


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json, or what a GGUF file has in its place. Raises UnsupportedModel, naming what is missing,
    malformed or unknown."""
    return model_config_of(_read_json(folder))


def model_config_of(raw: RawConfig) -> ModelConfig:
    """Likewise, of a config.json that was read."""
    architecture = _architecture(raw)
    raw = {**architecture.defaults, **(_of_text(raw) if architecture.multimodal else raw)}
    quantisation = read_quantisation(raw)
    layers = positive(raw, "num_hidden_layers", most=MAX_LAYERS)
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    head_dim = hidden // heads if raw.get("head_dim") is None else positive(raw, "head_dim")
    source = source_of(raw)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        of_heads, of_keys = map(source.name_of, ("num_attention_heads", "num_key_value_heads"))
        raise UnsupportedModel(
            f"{source.file} has {of_heads} = {heads}, {of_keys} = {kv_heads} and heads of {head_dim} elements "
            f"({source.name_of('head_dim')}); the heads must divide evenly and their size must be even"
        )
    max_positions = positive(raw, "max_position_embeddings", most=MAX_TOKENS)
    traits = architecture.traits(raw, layers)
    rope, local_rope = read_ropes(raw, max_positions, head_dim)
    if any(each.rotary_fraction != 1.0 for each in (rope, local_rope or rope)) and not architecture.rotates_parts:
        raise UnsupportedModel(
            f"{source.file} sets {source.name_of('partial_rotary_factor')}; {architecture.name} rotates whole heads"
        )
    return ModelConfig(
        architecture=architecture.name,
        traits=traits,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_norm_eps(raw, "layer_norm_eps" if traits.norm == "layer" else "rms_norm_eps"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=rope,
        max_model_len=_native_length(raw, rope, local_rope, max_positions),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
        checkpoint_dtype=_checkpoint_dtype(raw),
        quantisation=quantisation,
        activation=_activation(raw),
        local_rope=local_rope,
    )


def _read_json(folder: Path) -> RawConfig:
    config = read_config(folder)
    if not config and not is_file(folder / "config.json"):
        raise UnsupportedModel(f"{folder} is not a model folder: it has no config.json")
    return config


def _architecture(raw: RawConfig) -> Architecture:
    names = raw.get("architectures")
    named = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for name in named:
        if name in architectures():
            return architectures()[name]
    raise UnsupportedModel(
        f"unsupported architecture: {quote_value(', '.join(named[:_SHOWN])) or 'none named'}",
        supported=", ".join(architectures()),
    )


def _of_text(raw: RawConfig) -> RawConfig:
    """Return the text model's part of a multimodal config.json, over the values of the whole."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UnsupportedModel("config.json lacks text_config, which describes the model of text in a multimodal one")
    return {**raw, **{key: value for key, value in text.items() if value is not None or key not in raw}}


def _activation(raw: RawConfig) -> Activation:
    name = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"unsupported activation: {quote_value(name)} (supported: {', '.join(map(str, _ACTIVATIONS))})"
        )
    return _ACTIVATIONS[name]


def _norm_eps(raw: RawConfig, key: str) -> float:
    value = number(raw, key, 1e-6)
    if value < 0:
        raise refusal(raw, key, value, "it must be 0 or more")
    return value


def _native_length(raw: RawConfig, rope: RopeConfig, local_rope: RopeConfig | None, max_positions: int) -> int:
    """Longest context without further settings: configs of linear and yarn models may give the unscaled length, but
    not those of Gemma 3, which scale in layers without a window alone.

    Raises UnsupportedModel where the scaling makes it no length.
    """
    scaled = max_positions
    if rope.kind == "linear" and local_rope is None:
        scaled = max(1, int(max_positions * rope.factor))
    elif rope.kind == "yarn":
        scaled = max(max_positions, int(rope.original_max_positions * rope.factor))
    source = source_of(raw)
    refuse_more(f"{source.name_of('max_position_embeddings')}, scaled for RoPE,", scaled, MAX_TOKENS, source.file)
    return scaled


def _checkpoint_dtype(raw: RawConfig) -> CheckpointDtype:
    name = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if not _is_checkpoint_dtype(name):
        supported = ", ".join(get_args(CheckpointDtype))
        raise UnsupportedModel(f"the weights are {quote_value(name)}; the torch backend reads {supported}")
    return name


def _is_checkpoint_dtype(value: object) -> TypeGuard[CheckpointDtype]:
    return value in get_args(CheckpointDtype)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value[:_MAX_END_TOKENS] if isinstance(value, list) else [value]
    return tuple(item for item in ids if isinstance(item, int) and 0 <= item < MAX_SIZE)
