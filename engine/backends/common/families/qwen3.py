"""Qwen 3 (dense): Llama's block with each query and key head normalised before RoPE."""

from __future__ import annotations

from engine.backends.common.families.base import Architecture, RawConfig, Traits, qwen_windows


def _traits(raw: RawConfig, layers: int) -> Traits:
    attention_bias = bool(raw.get("attention_bias", False))
    return Traits(windows=qwen_windows(raw, layers), qkv_bias=attention_bias, o_bias=attention_bias, qk_norm="head")


ARCHITECTURE = Architecture("Qwen3ForCausalLM", _traits)
