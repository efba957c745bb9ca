"""Llama 1 to 3 and the many models that share its block (Touvron et al. 2023)."""

from __future__ import annotations

from engine.backends.common.families.base import Architecture, RawConfig, Traits, full_attention


def _traits(raw: RawConfig, layers: int) -> Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return Traits(
        windows=full_attention(layers),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


ARCHITECTURE = Architecture("LlamaForCausalLM", _traits)
