"""Qwen 2 and 2.5: Llama's block with biases on query, key and value."""

from __future__ import annotations

from engine.backends.common.families.base import Architecture, RawConfig, Traits, qwen_windows


def _traits(raw: RawConfig, layers: int) -> Traits:
    return Traits(windows=qwen_windows(raw, layers), qkv_bias=True)


ARCHITECTURE = Architecture("Qwen2ForCausalLM", _traits)
