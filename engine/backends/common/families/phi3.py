"""Phi 3 and 4: Llama's block from fused tensors, a part of each head rotated, LongRoPE (Abdin et al. 2024)."""

from __future__ import annotations

from engine.backends.common.config_values import window
from engine.backends.common.families.base import Architecture, RawConfig, TensorNames, Traits


def _traits(raw: RawConfig, layers: int) -> Traits:
    return Traits(windows=(window(raw),) * layers)


_NAMES = TensorNames(q="self_attn.qkv_proj", k="", v="", gate="mlp.gate_up_proj", up="")

ARCHITECTURE = Architecture("Phi3ForCausalLM", _traits, _NAMES, {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0})
