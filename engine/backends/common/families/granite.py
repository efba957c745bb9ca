"""Granite 3 (dense): Llama's block with a multiplier wherever sizes could drift (IBM 2024)."""

from __future__ import annotations

from engine.backends.common.config_values import number, positive_number
from engine.backends.common.families.base import Architecture, RawConfig, Traits, full_attention


def _traits(raw: RawConfig, layers: int) -> Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return Traits(
        windows=full_attention(layers),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        score_scale=positive_number(raw, "attention_multiplier", 1.0),
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive_number(raw, "logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture("GraniteForCausalLM", _traits)
