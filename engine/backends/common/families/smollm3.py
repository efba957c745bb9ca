"""SmolLM 3: Llama's block, without RoPE in every fourth layer (Yang et al. 2025; Hugging Face 2025)."""

from __future__ import annotations

from engine.backends.common.config_values import positive
from engine.backends.common.families.base import (
    Architecture,
    RawConfig,
    Traits,
    full_attention,
    typed_windows,
)
from engine.config import quote_value
from engine.errors import UnsupportedModel


def _traits(raw: RawConfig, layers: int) -> Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    no_rope_layers = _no_rope_layers(raw, layers)
    return Traits(
        windows=_windows(raw, layers, no_rope_layers),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        no_rope_layers=no_rope_layers,
    )


def _no_rope_layers(raw: RawConfig, layers: int) -> frozenset[int]:
    """`no_rope_layers` has a 1 for each layer with RoPE, whatever its name says."""
    with_rope = raw.get("no_rope_layers")
    if with_rope is None:
        every = positive(raw, "no_rope_layer_interval", 4)
        return frozenset(range(every - 1, layers, every))
    if not isinstance(with_rope, list) or len(with_rope) < layers:
        raise UnsupportedModel(
            f"config.json has no_rope_layers = {quote_value(with_rope)}; it must be a list of {layers} numbers"
        )
    return frozenset(layer for layer in range(layers) if not with_rope[layer])


def _windows(raw: RawConfig, layers: int, no_rope_layers: frozenset[int]) -> tuple[int | None, ...]:
    """Windows only where `use_sliding_window`; then by `layer_types`, or where there is no RoPE."""
    if not raw.get("use_sliding_window", False):
        return full_attention(layers)
    kinds = ["sliding_attention" if layer in no_rope_layers else "full_attention" for layer in range(layers)]
    return typed_windows({"layer_types": kinds, **{key: raw[key] for key in raw if raw[key] is not None}}, layers, 1)


ARCHITECTURE = Architecture(
    "SmolLM3ForCausalLM", _traits, defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
)
