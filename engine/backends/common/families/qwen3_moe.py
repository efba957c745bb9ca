"""Qwen 3's mixtures of experts: Qwen 3's block, with experts in place of the MLP in most layers."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.common.config_values import window
from engine.backends.common.families import qwen3
from engine.backends.common.families.base import Architecture, RawConfig, Traits
from engine.backends.common.families.experts import qwen_experts


def _traits(raw: RawConfig, layers: int) -> Traits:
    tokens = window(raw, 4096) if raw.get("use_sliding_window", False) else None
    return replace(
        qwen3.ARCHITECTURE.traits(raw, layers),
        windows=(tokens,) * layers,
        experts=qwen_experts(raw, layers),
    )


ARCHITECTURE = Architecture("Qwen3MoeForCausalLM", _traits)
