"""Mixtral: Mistral's block with a mixture of experts in place of its MLP (Jiang et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from engine.backends.common.config_values import positive
from engine.backends.common.families import mistral
from engine.backends.common.families.base import Architecture, RawConfig, TensorNames, Traits
from engine.backends.common.families.experts import ExpertNames, Experts, expert_counts


def _traits(raw: RawConfig, layers: int) -> Traits:
    count, per_token = expert_counts(raw)
    experts = Experts(
        layers=(True,) * layers,
        count=count,
        per_token=per_token,
        inner=positive(raw, "intermediate_size"),
    )
    return replace(mistral.ARCHITECTURE.traits({"sliding_window": None, **raw}, layers), experts=experts)


_NAMES = TensorNames(
    experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2")
)

ARCHITECTURE = Architecture("MixtralForCausalLM", _traits, _NAMES)
