"""Qwen 1.5 and 2 with experts: Qwen 2's block, a mixture and one expert for every token in its MLP's place."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.common.config_values import positive, window
from engine.backends.common.families import qwen2
from engine.backends.common.families.base import Architecture, RawConfig, Traits, full_attention
from engine.backends.common.families.experts import qwen_experts


def _traits(raw: RawConfig, layers: int) -> Traits:
    return replace(
        qwen2.ARCHITECTURE.traits(raw, layers),
        windows=_windows(raw, layers),
        qkv_bias=bool(raw.get("qkv_bias", True)),
        experts=qwen_experts(raw, layers, shared_inner=positive(raw, "shared_expert_intermediate_size")),
    )


def _windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Windows only where `use_sliding_window`; then by `layer_types`, or in every other layer below
    `max_window_layers`."""
    tokens = window(raw, 4096) if raw.get("use_sliding_window", False) else None
    if tokens is None:
        return full_attention(layers)
    kinds, end = raw.get("layer_types"), raw.get("max_window_layers", 28)
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(tokens if kind == "sliding_attention" else None for kind in kinds)
    return tuple(tokens if isinstance(end, int) and layer < end and layer % 2 == 0 else None for layer in range(layers))


ARCHITECTURE = Architecture("Qwen2MoeForCausalLM", _traits)
