"""OLMo 2: norms after each half of a block, none before, and one over all queries and one over all keys (OLMo 2025)."""

from __future__ import annotations

from engine.backends.common.families.base import (
    Architecture,
    RawConfig,
    TensorNames,
    Traits,
    full_attention,
)


def _traits(raw: RawConfig, layers: int) -> Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return Traits(windows=full_attention(layers), qkv_bias=attention_bias, o_bias=attention_bias, qk_norm="projection")


_NAMES = TensorNames(
    input_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
)

ARCHITECTURE = Architecture("Olmo2ForCausalLM", _traits, _NAMES, {"rms_norm_eps": 1e-5})
