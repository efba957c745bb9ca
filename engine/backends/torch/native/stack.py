"""All blocks of a model in one native call: at few rows, much of a step would else go into Python between them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.torch.model.rope import RotaryEmbedding
from engine.backends.torch.native.attention import NativeAttention, NativeStep
from engine.backends.torch.native.layer import Fused
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
    """The products of a block, each with all that is fused with it, and what turns its query and key heads."""

    qkv: Fused
    o: Fused
    gated: Fused
    down: Fused
    rotary: RotaryEmbedding | None


class Stack:
    """Blocks that attend over the pages of `attention`, whose layers they are, in one call. It gives to the bit what
    they give one by one."""

    def __init__(self, library: NativeLibrary, blocks: Sequence[StackedBlock], attention: NativeAttention) -> None:
        """Raises AttributeError where the library has no such function."""
        self._kept = library, tuple(blocks), attention  # whose addresses the library is given
        self._threads, self._floats = library.threads, attention.floats
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
        self._width = max(max(block.qkv.form.outputs + block.o.form.inputs, block.down.form.inputs) for block in blocks)
        self._run = library.functions["ericllm_blocks"]
        self._run.restype = None
        self._run.argtypes = (
            *(_ADDRESS, _FLAG, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS),
            *(_ADDRESS, _SIZE, _ADDRESS, _FLAG, _ADDRESS, _SIZE, _ADDRESS),
        )

    def __call__(
        self,
        hidden: Tensor,
        step: NativeStep,
        angles: Mapping[RotaryEmbedding | None, tuple[Tensor, Tensor] | None],
        rows: Tensor | None = None,
    ) -> Tensor:
        """`hidden` [T, hidden size], without gaps, after all blocks, in its place; of `rows` [R] alone if given, int64.

        angles: float32, of each rotary.
        """
        assert hidden.is_contiguous(), "what blocks change in its place has no gaps"
        turns = [turn for rotary in self._rotaries if (turn := angles[rotary]) is not None]
        memory = torch.empty(len(hidden) * self._width, dtype=hidden.dtype)
        out = hidden if rows is None else hidden.new_empty(len(rows), hidden.shape[1])
        described = (Angles * len(turns))(
            *(Angles(cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1]) for cosines, sines in turns)
        )
        self._run(
            self._threads,
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
    """Its blocks as one, where all lie on one device, and each is fused as a whole and attends by the kernel alone."""
    if len(decoder.stages) > 1:
        return None
    found = []
    for layer, block in enumerate(block for stage in decoder.stages for block in stage.blocks):
        fused = block.fused
        if fused is None or fused.o.fused is None or fused.down.fused is None:
            return None
        if block.qk_norm is not None and not attention.norms(layer):
            return None
        found.append(StackedBlock(fused.qkv, fused.o.fused, fused.gated, fused.down.fused, block.rotary))
    return Stack(library, found, attention)
