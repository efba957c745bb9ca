"""What distinguishes one decoder architecture from another, as data; everything else is shared. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.backends.torch.archs.experts import ExpertNames, Experts

RawConfig = Mapping[str, object]
"""config.json as read."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint keeps its tensors. Layer names are relative to `layer.format(i)`; .weight/.bias follow."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    experts: ExpertNames = field(default_factory=ExpertNames)


@dataclass(frozen=True, slots=True)
class Traits:
    """How one model's blocks differ from plain Llama.

    windows: per layer, how many tokens back (itself included) a token sees; None sees all.  qk_norm: RMS norm
    of each query and key head before RoPE.  The biases say which linear layers have one.  experts: what is in place
    of some layers' MLP.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, None where it has a plain MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture: its name in config.json, its traits for a given config, its tensor names."""

    name: str
    traits: Callable[[RawConfig, int], Traits]
    """Traits for (config.json, number of layers)."""
    names: TensorNames = field(default_factory=TensorNames)


def full_attention(layers: int) -> tuple[int | None, ...]:
    """No layer has a window."""
    return (None,) * layers


def qwen_windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: windows only where `use_sliding_window`; then by `layer_types`, or from `max_window_layers` up."""
    window = raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window", False) or not isinstance(window, int):
        return full_attention(layers)
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = raw.get("max_window_layers", 28)
    return tuple(window if isinstance(first, int) and layer >= first else None for layer in range(layers))
