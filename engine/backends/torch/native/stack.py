"""Stack: all blocks of a model in one native call, as Python between them would take much of a step with few rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.torch.model.rope import RotaryEmbedding
from engine.backends.torch.native.attention import NativeAttention, NativeStep
from engine.backends.torch.native.layer import FusedLinear
from engine.backends.torch.native.library import NativeLibrary

if TYPE_CHECKING:
    from engine.backends.torch.model.decoder import Decoder

_ADDRESS, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Linear(ctypes.Structure):
    """`Linear` of blocks.cpp."""

    _fields_ = (("product", _ADDRESS), ("layer", _ADDRESS))


class Block(ctypes.Structure):
    """`Block` of blocks.cpp."""

    _fields_ = (
        ("qkv", Linear),
        ("o", Linear),
        ("gated", Linear),
        ("down", Linear),
        ("attention", _ADDRESS),
        ("angles", _SIZE),
    )


class Angles(ctypes.Structure):
    """`Angles` of blocks.cpp."""

    _fields_ = (("cosines", _ADDRESS), ("sines", _ADDRESS), ("turned", _SIZE))


@dataclass(frozen=True, slots=True)
class StackedBlock:
    """The fused products of a block, and its rotary embedding."""

    qkv: FusedLinear
    o: FusedLinear
    gated: FusedLinear
    down: FusedLinear
    rotary: RotaryEmbedding | None


class Stack:
    """The blocks of a model with native `attention`, in one call. Results are bitwise those of separate calls."""

    def __init__(self, library: NativeLibrary, blocks: Sequence[StackedBlock], attention: NativeAttention) -> None:
        """Raise AttributeError where the library lacks the function."""
        self._references = library, tuple(blocks), attention  # kept alive for their addresses
        self._floats = attention.floats
        self._rotaries = tuple(dict.fromkeys(block.rotary for block in blocks if block.rotary is not None))
        self._blocks = (Block * len(blocks))(
            *(
                Block(
                    *(Linear(each.product, each.address) for each in (block.qkv, block.o, block.gated, block.down)),
                    address,
                    -1 if block.rotary is None else self._rotaries.index(block.rotary),
                )
                for block, address in zip(blocks, attention.addresses, strict=True)
            )
        )
        self._address, self._count = ctypes.addressof(self._blocks), len(blocks)
        self._width = max(
            max(block.qkv.format.outputs + block.o.format.inputs, block.down.format.inputs) for block in blocks
        )
        self._run = library.functions["ericllm_blocks"]
        self._run.restype = None
        self._run.argtypes = (
            *(_FLAG, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS),
            *(_ADDRESS, _SIZE, _ADDRESS, _FLAG, _ADDRESS, _SIZE, _ADDRESS),
        )

    def __call__(
        self,
        hidden: Tensor,
        step: NativeStep,
        positions: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return contiguous `hidden` [T, hidden size] after all blocks, in place; only of `rows` [R], int64, if given.

        positions: int64 [T].
        """
        assert hidden.is_contiguous(), "blocks change contiguous states in place"
        rotations = [rotary.angles(positions, torch.float32) for rotary in self._rotaries]
        memory = torch.empty(len(hidden) * self._width, dtype=hidden.dtype)
        out = hidden if rows is None else hidden.new_empty(len(rows), hidden.shape[1])
        described = (Angles * len(rotations))(
            *(Angles(cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1]) for cosines, sines in rotations)
        )
        self._run(
            torch.get_num_threads(),
            self._address,
            self._count,
            step.address,
            ctypes.addressof(described),
            hidden.data_ptr(),
            len(hidden),
            memory.data_ptr(),
            self._floats,
            None if rows is None else rows.data_ptr(),
            len(out),
            out.data_ptr(),
        )
        return out


def stack_blocks(decoder: Decoder, library: NativeLibrary, attention: NativeAttention) -> Stack | None:
    """Return the stack of a decoder; None unless it is on one device, with all blocks fused and native attention."""
    if len(decoder.stages) > 1:
        return None
    blocks = []
    for layer, block in enumerate(block for stage in decoder.stages for block in stage.blocks):
        fused = block.fused
        if fused is None or fused.o.fused is None or fused.down.fused is None:
            return None
        if block.qk_norm is not None and not attention.norms(layer):
            return None
        blocks.append(StackedBlock(fused.qkv, fused.o.fused, fused.gated, fused.down.fused, block.rotary))
    return Stack(library, blocks, attention)
