"""StableLM 1 to 2: layer norms with biases, a quarter of each head rotated, attention and MLP in parallel in some."""

from __future__ import annotations

from engine.backends.common.families.base import (
    Architecture,
    RawConfig,
    TensorNames,
    Traits,
    full_attention,
)


def _traits(raw: RawConfig, layers: int) -> Traits:
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        norm="layer",
        qk_norm="each_head" if raw.get("qk_layernorm", False) else None,
        parallel=bool(raw.get("use_parallel_residual", False)),
    )


_NAMES = TensorNames(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")

ARCHITECTURE = Architecture(
    "StableLmForCausalLM", _traits, _NAMES, {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}
)
