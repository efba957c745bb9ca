"""config.json as a frozen, checked value. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from engine.backends.torch.archs import ARCHITECTURES
from engine.backends.torch.archs.base import Architecture, RawConfig, Traits
from engine.backends.torch.quant.declared import Quantisation, read_quantisation
from engine.errors import UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
CheckpointDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: a base, a scaling kind with its constants (config.json's names), and what settings add.

    original_max_positions: context length that the model was trained at before scaling.  max_positions: the length
    that "dynamic" must reach.  alpha: NTK stretch of the base.  compress: positions are divided by it.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    alpha: float = 1.0
    compress: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a model and how long a context it takes. Sizes are in elements, lengths in tokens.

    quantisation: what config.json says of it; None where it says nothing, though weights may be quantised still.
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

    @property
    def sliding_window(self) -> int | None:
        """Tokens that any layer looks back on at most; None where some layer sees the whole context."""
        windows = [window for window in self.traits.windows if window is not None]
        return max(windows) if len(windows) == self.layers else None

    @property
    def kv_elements_per_token(self) -> int:
        """Key and value elements that one token keeps over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises UnsupportedModel, naming what is missing, malformed or unknown."""
    raw = _read_json(folder)
    architecture = _architecture(raw)
    quantisation = read_quantisation(raw)
    _refuse_unknown_parts(raw)
    layers = _positive(raw, "num_hidden_layers")
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"config.json has {heads} heads, {kv_heads} key-value heads and a head size of {head_dim}; "
            "the heads must divide evenly and the head size must be even"
        )
    max_positions = _positive(raw, "max_position_embeddings")
    rope = _read_rope(raw, max_positions)
    return ModelConfig(
        architecture=architecture.name,
        traits=architecture.traits(raw, layers),
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=rope,
        max_model_len=_native_length(rope, max_positions),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
        checkpoint_dtype=_checkpoint_dtype(raw),
        quantisation=quantisation,
    )


def _read_json(folder: Path) -> RawConfig:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{folder} is no model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return raw


def _architecture(raw: RawConfig) -> Architecture:
    names = raw.get("architectures")
    named = [str(name) for name in names] if isinstance(names, list) else []
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedModel(
        f"the torch backend does not know the architecture {', '.join(named) or '(none named)'}; "
        f"it knows {', '.join(ARCHITECTURES)}"
    )


def _refuse_unknown_parts(raw: RawConfig) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json asks for the activation {activation}; the torch backend knows silu")
    if _number(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("config.json sets partial_rotary_factor; the torch backend rotates whole heads only")


def _read_rope(raw: RawConfig, max_positions: int) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta` (before it)."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel("config.json's rope_scaling is no object")
    rope: RawConfig = {key: value for key, value in found.items() if value is not None}
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not _is_rope_kind(kind):
        raise UnsupportedModel(
            f"the torch backend does not know RoPE scaling of type {kind}; it knows {', '.join(get_args(RopeKind))}"
        )
    if _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("config.json sets partial_rotary_factor; the torch backend rotates whole heads only")
    original = max_positions
    if kind != "dynamic":
        original = _positive(rope, "original_max_position_embeddings", max_positions)
    factor = _number(rope, "factor", max_positions / original if kind == "yarn" else 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        max_positions=max_positions,
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        attention_factor=_optional_number(rope, "attention_factor"),
        mscale=_optional_number(rope, "mscale"),
        mscale_all_dim=_optional_number(rope, "mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _native_length(rope: RopeConfig, max_positions: int) -> int:
    """Longest context without further settings: configs of linear and yarn models may give the unscaled length."""
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def _checkpoint_dtype(raw: RawConfig) -> CheckpointDtype:
    name = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if not _is_checkpoint_dtype(name):
        known = ", ".join(get_args(CheckpointDtype))
        raise UnsupportedModel(f"the weights are {name}; the torch backend reads {known}")
    return name


def _is_rope_kind(value: object) -> TypeGuard[RopeKind]:
    return value in get_args(RopeKind)


def _is_checkpoint_dtype(value: object) -> TypeGuard[CheckpointDtype]:
    return value in get_args(CheckpointDtype)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if isinstance(item, int))


def _positive(raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a whole number of at least 1")
    return value


def _number(raw: Mapping[str, object], key: str, default: float) -> float:
    value = _optional_number(raw, key)
    return default if value is None else value


def _optional_number(raw: Mapping[str, object], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a number")
    return float(value)
