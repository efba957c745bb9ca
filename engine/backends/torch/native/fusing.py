"""Fusion of norms, gates and residual sums into native products, each verified against its separate parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.torch.model.decoder import Block, Decoder, FusedBlock, Residual
from engine.backends.torch.model.linear import Linear, close_enough
from engine.backends.torch.model.lora import LinearName
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp, Mlp
from engine.backends.torch.model.norms import Norm, RmsNorm, WideRmsNorm, identity
from engine.backends.torch.native.layer import FusedLinear, NativeLinear, rounds_rows

_CHECK_ROWS = 3

_logger = logging.getLogger(__name__)


def fuse_decoder(decoder: Decoder) -> Decoder:
    """Return `decoder` with all possible fusions. Each fused product is compared with its parts, on the real weights,
    once per shape; a difference switches off all further fusions."""
    traits, fuser = decoder.config.traits, _Fuser(decoder.config.traits.residual_scale)
    stages = [
        replace(stage, blocks=tuple(fuser.block(block, parallel=traits.parallel) for block in stage.blocks))
        for stage in decoder.stages
    ]
    head = fuser.fuse_norm(decoder.final_norm, decoder.head, scale=traits.logit_scale, out=torch.float32)
    return replace(decoder, stages=tuple(stages), fused_head=head)


class _Fuser:
    """Fuses the blocks of a decoder. alpha: factor of a block's output before the residual sum."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._passed: set[tuple[object, ...]] = set()
        self._off = False

    def block(self, block: Block, *, parallel: bool) -> Block:
        """Return the block, fused as a whole if possible, or only its MLP."""
        fused_block = self._fused_block(block, block.mlp) if isinstance(block.mlp, GatedMlp) and not parallel else None
        return replace(block, fused=fused_block, mlp=self._mlp(block.mlp) if fused_block is None else block.mlp)

    def fuse_norm(
        self, norm: Norm, linear: Linear, *, scale: float = 1.0, out: torch.dtype | None = None
    ) -> FusedLinear | None:
        """Return scale * linear(norm(x)) as one product, with dtype `out`; None where that is not possible."""
        weight = _norm_weight(norm)
        if weight is None or not isinstance(linear, NativeLinear):
            return None
        fused_linear = FusedLinear(linear, norm=weight.tensor, epsilon=weight.epsilon, alpha=scale, out=out)
        return self._verified(
            fused_linear, ("normed", type(norm), scale), fused_linear, lambda x: linear(norm(x)) * scale
        )

    def _fused_block(self, block: Block, mlp: GatedMlp) -> FusedBlock | None:
        qkv, gated = self.fuse_norm(block.input_norm, block.qkv), self._fuse_mlp(block.mlp_norm, mlp)
        if qkv is None or gated is None:
            return None
        o = self._residual(block.o, block.attention_out_norm, "o")
        down = self._residual(mlp.down, block.mlp_out_norm, "down")
        return FusedBlock(block.input_norm, qkv, o, block.mlp_norm, mlp, gated, down)

    def _mlp(self, mlp: Mlp) -> Mlp:
        match mlp:
            case GatedMlp():
                return replace(mlp, fused=self._fuse_mlp(identity, mlp))
            case MixtureMlp():
                experts = tuple(replace(expert, fused=self._fuse_mlp(identity, expert)) for expert in mlp.experts)
                return replace(mlp, experts=experts)
            case _:
                return mlp

    def _fuse_mlp(self, norm: Norm, mlp: GatedMlp) -> FusedLinear | None:
        weight = _norm_weight(norm)
        if weight is None or not (isinstance(mlp.gate_up, NativeLinear) and mlp.gate_up.format.interleaved):
            return None
        fused_linear = FusedLinear(mlp.gate_up, norm=weight.tensor, epsilon=weight.epsilon, activation=mlp.activation)
        kind = ("gated", type(norm), mlp.activation)
        return self._verified(fused_linear, kind, fused_linear, lambda x: mlp.activate_gate(mlp.gate_up(norm(x))))

    def _residual(self, linear: Linear, norm: Norm, place: LinearName) -> Residual:
        plain = Residual(linear, norm, self._alpha, place, None)
        if norm is not identity or not isinstance(linear, NativeLinear):
            return plain
        fused_linear, hidden = FusedLinear(linear, alpha=self._alpha), _random(linear.format.outputs, linear.dtype)

        def fused_block(x: Tensor) -> Tensor:
            return fused_linear(x, hidden.clone())

        verified = self._verified(fused_linear, ("residual",), fused_block, lambda x: plain(x, hidden, 0, ()))
        return replace(plain, fused=verified)

    def _verified(
        self,
        fused_linear: FusedLinear,
        kind: tuple[object, ...],
        fused_block: Callable[[Tensor], Tensor],
        separate: Callable[[Tensor], Tensor],
    ) -> FusedLinear | None:
        """Return `fused_linear` if `fused_block` gives the same as `separate`. kind: of the fusion, besides the
        weight's format."""
        if self._off:
            return None
        format, dtype = fused_linear.format, getattr(torch, fused_linear.format.dtype)
        key = (*kind, format)
        x = _random(format.inputs, dtype)
        if rounds_rows(format):  # the last bit of a normed row may change how its code is rounded
            dtype = torch.bfloat16
        if key in self._passed or close_enough(fused_block(x), separate(x), dtype):
            self._passed.add(key)
            return fused_linear
        self._off = True
        _logger.warning(
            "norms, gates and sums are not fused into native products, as a %s one with %d x %d weights differs",
            *(kind[0], format.outputs, format.inputs),
        )
        return None


@dataclass(frozen=True, slots=True)
class _NormWeight:
    """Weight of an RMSNorm; None without a norm."""

    tensor: Tensor | None
    epsilon: float


def _norm_weight(norm: Norm) -> _NormWeight | None:
    """Return the weight of a norm that can be fused; None for other norms."""
    match norm:
        case RmsNorm() | WideRmsNorm():
            return _NormWeight(norm.weight, norm.eps)
        case _:
            return _NormWeight(None, 0.0) if norm is identity else None


def _random(width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(_CHECK_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
