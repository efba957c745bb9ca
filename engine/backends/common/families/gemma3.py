"""Gemma 3, its text: Gemma 2's block with query and key norms for its caps, and windows with a RoPE of their own in
five layers of six (Gemma Team 2025)."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.common.config_values import positive
from engine.backends.common.families.base import Architecture, RawConfig, Traits
from engine.backends.common.families.gemma2 import DEFAULTS, NAMES, gemma_traits


def _traits(raw: RawConfig, layers: int) -> Traits:
    every = positive(raw, "sliding_window_pattern", 6)
    return replace(gemma_traits(raw, layers, every), qk_norm="head", attn_softcap=0.0)


_DEFAULTS: RawConfig = {**DEFAULTS, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}

ARCHITECTURE = Architecture("Gemma3ForCausalLM", _traits, NAMES, _DEFAULTS)

WITH_IMAGES = Architecture(
    "Gemma3ForConditionalGeneration",
    _traits,
    NAMES,
    {
        **_DEFAULTS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
    },
    multimodal=True,
)
"""The sizes from 4B on, which see images too; their config.json leaves out what is as in the first of them."""
