"""Differences between decoder architectures, as data; everything else is shared. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.backends.common.config_values import window
from engine.backends.common.families.experts import ExpertNames, Experts

RawConfig = Mapping[str, object]
"""config.json as read."""

NormKind = Literal["rms", "rms_plus_one", "layer"]
QkNormKind = Literal["head", "projection", "each_head"]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint keeps its tensors. Layer names are relative to `layer.format(i)`; .weight/.bias follow.

    A norm without a name is one that the block has not: the attention's and the MLP's input, or their output before it
    is added. A linear layer without a name is the last rows of the one before it, as in a fused `qkv_proj`.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    mlp_out_norm: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    experts: ExpertNames = field(default_factory=ExpertNames)

    @property
    def qkv(self) -> tuple[str, ...]:
        """The tensors that project to queries, keys and values."""
        return tuple(name for name in (self.q, self.k, self.v) if name)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The tensors that project to the MLP's gate and to what it gates."""
        return tuple(name for name in (self.gate, self.up) if name)


@dataclass(frozen=True, slots=True)
class Traits:
    """How one model's blocks differ from plain Llama.

    windows: per layer, how many tokens back (itself included) a token sees; None sees all.  no_rope_layers: layers
    whose queries and keys are not rotated.  The biases say which linear layers have one.
    norm: RMS norm, RMS norm by 1 + weight, or layer norm with a bias.  qk_norm: how queries and keys are normalised
    before they are rotated: each head by one weight, each by its own, or the whole projection; None where they are not.
    parallel: attention and MLP read the same normalised input.
    score_scale: what dot products are multiplied by, head_dim ** -0.5 where None.  attn_softcap, logit_softcap: scores
    and logits become cap * tanh(x / cap); 0 for none.  embedding_scale, residual_scale, logit_scale: multiply the
    embeddings, what is added to the residual, and the logits.  experts: what is in place of some layers' MLP.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm: NormKind = "rms"
    qk_norm: QkNormKind | None = None
    no_rope_layers: frozenset[int] = frozenset()
    parallel: bool = False
    score_scale: float | None = None
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, None where it has a plain MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture: its name in config.json, its traits for a given config, its tensor names.

    defaults: what holds where config.json is silent.
    multimodal: of the folder, the model of text alone is read: what config.json says of it under "text_config".
    """

    name: str
    traits: Callable[[RawConfig, int], Traits]
    """Traits for (config.json, number of layers)."""
    names: TensorNames = field(default_factory=TensorNames)
    defaults: RawConfig = field(default_factory=dict)
    multimodal: bool = False

    @property
    def rotates_parts(self) -> bool:
        """True if parts of heads may be rotated: with a `partial_rotary_factor` among the defaults."""
        return "partial_rotary_factor" in self.defaults


def full_attention(layers: int) -> tuple[int | None, ...]:
    """No layer has a window."""
    return (None,) * layers


def qwen_windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: windows only where `use_sliding_window`; then by `layer_types`, or from `max_window_layers` up."""
    tokens = window(raw, 4096) if raw.get("use_sliding_window", False) else None
    if tokens is None:
        return full_attention(layers)
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(tokens if kind == "sliding_attention" else None for kind in kinds)
    first = raw.get("max_window_layers", 28)
    return tuple(tokens if isinstance(first, int) and layer >= first else None for layer in range(layers))


def typed_windows(raw: RawConfig, layers: int, every: int) -> tuple[int | None, ...]:
    """A window in the layers that `layer_types` calls sliding; without it, in all but each `every`th."""
    tokens, kinds = window(raw), raw.get("layer_types")
    if tokens is None:
        return full_attention(layers)
    if not (isinstance(kinds, list) and len(kinds) == layers):
        kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    return tuple(tokens if kind == "sliding_attention" else None for kind in kinds)
