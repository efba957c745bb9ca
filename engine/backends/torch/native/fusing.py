"""Which norms, gates and residual sums become part of native products: those that fit and give what they give apart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.torch.model.decoder import Block, Decoder, FusedBlock, Residual
from engine.backends.torch.model.linear import Linear, close_enough
from engine.backends.torch.model.lora import Place
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp, Mlp
from engine.backends.torch.model.norms import Norm, RmsNorm, WideRmsNorm, unchanged
from engine.backends.torch.native.layer import Fused, NativeLinear, bits_of

_CHECK_ROWS = 3

_logger = logging.getLogger(__name__)


def fused(decoder: Decoder) -> Decoder:
    """`decoder` with everything fused that fits. No product is taken on trust: each is compared with its parts, on the
    real weights, once per shape, and a difference leaves all that follows as it is."""
    traits, make = decoder.config.traits, _Fuser(decoder.config.traits.residual_scale)
    stages = [
        replace(stage, blocks=tuple(make.block(block, parallel=traits.parallel) for block in stage.blocks))
        for stage in decoder.stages
    ]
    head = make.normed(decoder.final_norm, decoder.head, scale=traits.logit_scale, out=torch.float32)
    return replace(decoder, stages=tuple(stages), fused_head=head)


class _Fuser:
    """alpha: what a block's output is multiplied by before it is added to what went in."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._trusted: set[tuple[object, ...]] = set()
        self._off = False

    def block(self, block: Block, *, parallel: bool) -> Block:
        """The block, fused as a whole where it fits, or in its MLP alone."""
        whole = self._whole(block, block.mlp) if isinstance(block.mlp, GatedMlp) and not parallel else None
        return replace(block, fused=whole, mlp=self._mlp(block.mlp) if whole is None else block.mlp)

    def normed(self, norm: Norm, linear: Linear, *, scale: float = 1.0, out: torch.dtype | None = None) -> Fused | None:
        """scale * linear(norm(x)), as `out` if told; None where that does not fit."""
        weight = _weight_of(norm)
        if weight is None or not isinstance(linear, NativeLinear):
            return None
        made = Fused(linear, norm=weight.tensor, epsilon=weight.epsilon, alpha=scale, out=out)
        return self._checked(made, ("normed", type(norm), scale), made, lambda x: linear(norm(x)) * scale)

    def _whole(self, block: Block, mlp: GatedMlp) -> FusedBlock | None:
        qkv, gated = self.normed(block.input_norm, block.qkv), self._gated(block.mlp_norm, mlp)
        if qkv is None or gated is None:
            return None
        o = self._residual(block.o, block.attention_out_norm, "o")
        down = self._residual(mlp.down, block.mlp_out_norm, "down")
        return FusedBlock(block.input_norm, qkv, o, block.mlp_norm, mlp, gated, down)

    def _mlp(self, mlp: Mlp) -> Mlp:
        match mlp:
            case GatedMlp():
                return replace(mlp, fused=self._gated(unchanged, mlp))
            case MixtureMlp():
                experts = tuple(replace(expert, fused=self._gated(unchanged, expert)) for expert in mlp.experts)
                return replace(mlp, experts=experts)
            case _:
                return mlp

    def _gated(self, norm: Norm, mlp: GatedMlp) -> Fused | None:
        weight = _weight_of(norm)
        if weight is None or not (isinstance(mlp.gate_up, NativeLinear) and mlp.gate_up.form.interleaved):
            return None
        made = Fused(mlp.gate_up, norm=weight.tensor, epsilon=weight.epsilon, activation=mlp.activation)
        facts = ("gated", type(norm), mlp.activation)
        return self._checked(made, facts, made, lambda x: mlp.opened(mlp.gate_up(norm(x))))

    def _residual(self, linear: Linear, norm: Norm, place: Place) -> Residual:
        plain = Residual(linear, norm, self._alpha, place, None)
        if norm is not unchanged or not isinstance(linear, NativeLinear):
            return plain
        made, hidden = Fused(linear, alpha=self._alpha), _random(linear.form.outputs, linear.dtype)

        def whole(x: Tensor) -> Tensor:
            return made(x, hidden.clone())

        checked = self._checked(made, ("residual",), whole, lambda x: plain(x, hidden, 0, ()))
        return replace(plain, fused=checked)

    def _checked(
        self,
        made: Fused,
        facts: tuple[object, ...],
        whole: Callable[[Tensor], Tensor],
        parts: Callable[[Tensor], Tensor],
    ) -> Fused | None:
        """`made`, where the `whole` gives what its `parts` give. facts: what its code depends on besides the weight."""
        if self._off:
            return None
        form, dtype = made.form, getattr(torch, made.form.dtype)
        key = (*facts, form)
        x = _random(form.inputs, dtype)
        if bits_of(form) is not None:  # a last place of what is normed may round a row's code the other way
            dtype = torch.bfloat16
        if key in self._trusted or close_enough(whole(x), parts(x), dtype):
            self._trusted.add(key)
            return made
        self._off = True
        _logger.warning(
            "norms, gates and residual sums stay apart from native products, as a %s one by %d x %d weights differs",
            *(facts[0], form.outputs, form.inputs),
        )
        return None


@dataclass(frozen=True, slots=True)
class _NormWeight:
    """What an RMSNorm multiplies by; nothing where nothing is normed."""

    tensor: Tensor | None
    epsilon: float


def _weight_of(norm: Norm) -> _NormWeight | None:
    """That of a norm which a product can have in it; None for others."""
    match norm:
        case RmsNorm() | WideRmsNorm():
            return _NormWeight(norm.weight, norm.eps)
        case _:
            return _NormWeight(None, 0.0) if norm is unchanged else None


def _random(width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(_CHECK_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
