"""Gemma 2: norms around each half of a block, windows in every other layer, soft-caps (Riviere et al. 2024)."""

from __future__ import annotations

from engine.backends.common.config_values import number, positive, positive_number
from engine.backends.common.families.base import (
    Architecture,
    RawConfig,
    TensorNames,
    Traits,
    typed_windows,
)
from engine.errors import UnsupportedModel

NAMES = TensorNames(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

DEFAULTS: RawConfig = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def gemma_traits(raw: RawConfig, layers: int, every: int) -> Traits:
    """Return the traits that Gemma 2 and 3 share; each `every`th layer sees the whole context."""
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            "config.json sets use_bidirectional_attention; the torch backend supports causal attention only"
        )
    attention_bias = bool(raw.get("attention_bias", False))
    return Traits(
        windows=typed_windows(raw, layers, every),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        norm="rms_plus_one",
        score_scale=positive_number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=number(raw, "attn_logit_softcapping", 0.0),
        logit_softcap=number(raw, "final_logit_softcapping", 0.0),
        embedding_scale=positive(raw, "hidden_size") ** 0.5,
    )


def _traits(raw: RawConfig, layers: int) -> Traits:
    return gemma_traits(raw, layers, every=2)


ARCHITECTURE = Architecture(
    "Gemma2ForCausalLM",
    _traits,
    NAMES,
    {**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
