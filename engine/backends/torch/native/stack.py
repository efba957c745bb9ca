"""Stack: a step of a model in one native call, as Python between calls would take much of a step with few rows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.model.attention import softcap_
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.rope import RotaryEmbedding
from engine.backends.torch.model.step_plan import sampled_rows
from engine.backends.torch.native.attention import NativeAttention
from engine.backends.torch.native.layer import CodedEmbedding, FusedLinear
from engine.backends.torch.native.library import NativeLibrary

# Structures of blocks.cpp, which documents their fields.

_ADDRESS, _SIZE, _FLAG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


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
        ("rotary", _SIZE),
    )


class Rotary(ctypes.Structure):
    """`Rotary` of blocks.cpp."""

    _fields_ = (("parts", _ADDRESS), ("turned", _SIZE))


class Embedding(ctypes.Structure):
    """`Embedding` of blocks.cpp."""

    _fields_ = (
        ("table", _ADDRESS),
        ("look_up", _ADDRESS),
        ("coded", _ADDRESS),
        ("ids", _SIZE),
        ("size", _SIZE),
        ("scale", _FLOAT),
    )


class Model(ctypes.Structure):
    """`Model` of blocks.cpp."""

    _fields_ = (
        ("embedding", Embedding),
        ("blocks", _ADDRESS),
        ("num_blocks", _SIZE),
        ("rotaries", _ADDRESS),
        ("num_rotaries", _SIZE),
        ("width", _SIZE),
        ("head", Linear),
        ("floats", _FLAG),
    )


# Rotation angles of the positions that steps have met.

ANGLE_ROWS = 256
"""Positions in a part: `kAngleRows` of blocks.cpp."""

_ANGLE_TEMPORARIES = 4
"""What computing a part takes, in parts: radians, cosines, and sines before and after their sign."""


class AngleTable:
    """Cosines and sines of a rotary embedding by position, in parts of ANGLE_ROWS positions that are computed when the
    first of them is needed. For half of the angles, as the other half is the same: 256 bytes per position of heads of
    64, a hundredth of what keys and values take.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        self._parts: list[Tensor] = []
        self._addresses = array("Q")

    def extend(self, positions: int) -> Rotary:
        """Return the angles of positions from 0 to at least `positions`; what was returned before is no longer
        valid."""
        while (first := len(self._parts) * ANGLE_ROWS) < positions:
            self._parts.append(self._part(first))
            self._addresses.append(self._parts[-1].data_ptr())
        return Rotary(parts=self._addresses.buffer_info()[0], turned=self._parts[0].shape[1])

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""
        return ANGLE_ROWS * self._rotary.rotated_dims * torch.float32.itemsize

    def _part(self, first: int) -> Tensor:
        cos, sin = (
            each.squeeze(1) for each in self._rotary.angles(torch.arange(first, first + ANGLE_ROWS), torch.float32)
        )
        half = cos.shape[1] // 2
        return torch.cat((cos[:, :half], sin[:, half:]), dim=1)


# The model in one call.


@dataclass(frozen=True, slots=True)
class StackedBlock:
    """The fused products of a block, and its rotary embedding."""

    qkv: FusedLinear
    o: FusedLinear
    gated: FusedLinear
    down: FusedLinear
    rotary: RotaryEmbedding | None


@dataclass(frozen=True, slots=True)
class StackResult:
    """Result of a step. states: [T, hidden size] of all rows before the last norm; before the last block too where
    fewer rows are sampled.

    logits: float32 [R, vocab] of the sampled rows; None where the head is no native one, or states are requested.
    sampled: [R, hidden size] of these rows before the last norm, or of all; None with logits.
    best: int64 [R], the id of the highest of each row, as `NativeLibrary.best_tokens` returns it; or None.
    """

    states: Tensor
    sampled: Tensor | None
    logits: Tensor | None
    best: Tensor | None


class Stack:
    """A model with native `attention`, from ids to logits in one call. Results are bitwise those of separate calls."""

    def __init__(
        self,
        library: NativeLibrary,
        decoder: Decoder,
        blocks: Sequence[StackedBlock],
        attention: NativeAttention,
    ) -> None:
        """Raise AttributeError where the library lacks the function."""
        head = decoder.fused_head
        self._references = library, decoder, tuple(blocks)  # kept alive for their addresses
        self._attention, self._dtype = attention, torch.float32 if attention.floats else torch.bfloat16
        self._softcap = decoder.config.traits.logit_softcap
        self._hidden_size = decoder.config.hidden_size
        self._vocab_size = 0 if head is None else head.format.outputs
        self._width = max(
            max(block.qkv.format.outputs + block.o.format.inputs, block.down.format.inputs) for block in blocks
        )
        rotaries = list(dict.fromkeys(block.rotary for block in blocks if block.rotary is not None))
        self._angles, self._num_positions = [AngleTable(each) for each in rotaries], 0
        self._rotaries = (Rotary * len(rotaries))()
        self._blocks = (Block * len(blocks))(
            *(
                Block(
                    *(_linear(each) for each in (block.qkv, block.o, block.gated, block.down)),
                    address,
                    -1 if block.rotary is None else rotaries.index(block.rotary),
                )
                for block, address in zip(blocks, attention.addresses, strict=True)
            )
        )
        self._embedding = _describe_embedding(library, decoder, self._dtype, self._hidden_size)
        self._model = Model(
            embedding=self._embedding,
            blocks=ctypes.addressof(self._blocks),
            num_blocks=len(blocks),
            rotaries=ctypes.addressof(self._rotaries),
            num_rotaries=len(rotaries),
            width=self._width,
            head=Linear() if head is None else _linear(head),
            floats=attention.floats,
        )
        self._address = ctypes.addressof(self._model)
        self._run = library.functions["ericllm_step"]
        self._run.restype = ctypes.c_bool
        self._run.argtypes = (_FLAG, *(_ADDRESS,) * 3, _SIZE, _ADDRESS, _SIZE, *(_ADDRESS,) * 4)

    def __call__(self, chunks: Sequence[ChunkInput], *, samples: bool = True) -> StackResult:
        """Compute the chunks. samples: False where the states of all rows are wanted, not logits of the sampled ones.

        Raises IndexError for an id that the embedding does not have.
        """
        step = self._attention.step(chunks)
        self._extend_angles(max(chunk.end for chunk in chunks))
        ids = array("q", [token for chunk in chunks for token in chunk.token_ids])
        rows = len(ids)
        selected = array("q", sampled_rows(chunks, step.last_rows) if samples else range(rows))
        count = len(selected)
        states = torch.empty((rows, self._hidden_size), dtype=self._dtype)
        memory = torch.empty(rows * self._width + count * self._hidden_size, dtype=self._dtype)
        sampled = logits = best = None
        if samples and self._vocab_size:
            logits = torch.empty((count, self._vocab_size), dtype=torch.float32)
            best = None if self._softcap else torch.empty(count, dtype=torch.int64)
        computed = self._run(
            torch.get_num_threads(),
            self._address,
            step.address,
            ids.buffer_info()[0],
            rows,
            selected.buffer_info()[0],
            count,
            states.data_ptr(),
            memory.data_ptr(),
            None if logits is None else logits.data_ptr(),
            None if best is None else best.data_ptr(),
        )
        if not computed:
            raise IndexError(f"an id is not one of {self._embedding.ids}")
        if logits is None:
            sampled = states if count == rows else memory[rows * self._width :].view(count, self._hidden_size)
        elif self._softcap:
            logits = softcap_(logits, self._softcap)
        return StackResult(states, sampled, logits, best)

    def angle_bytes(self, positions: int) -> tuple[int, int]:
        """Return the bytes of the rotation angles of that many positions, and of what computes a part of them before a
        step."""
        parts = [table.part_bytes for table in self._angles]
        return max(0, -(-positions // ANGLE_ROWS)) * sum(parts), _ANGLE_TEMPORARIES * max(parts, default=0)

    def _extend_angles(self, positions: int) -> None:
        if positions <= self._num_positions:
            return
        for index, table in enumerate(self._angles):
            self._rotaries[index] = table.extend(positions)
        self._num_positions = -(-positions // ANGLE_ROWS) * ANGLE_ROWS


def _linear(fused: FusedLinear) -> Linear:
    return Linear(fused.product, fused.address)


def _describe_embedding(library: NativeLibrary, decoder: Decoder, dtype: torch.dtype, size: int) -> Embedding:
    table, scale = decoder.embedding, decoder.config.traits.embedding_scale
    described = Embedding(size=size, scale=float(torch.tensor(scale, dtype=dtype)))
    if isinstance(table, CodedEmbedding):
        described.look_up, described.coded = library.look_up_address(dtype), table.address
        described.ids = table.layer.format.outputs
    else:
        assert isinstance(table, Tensor), "no other embedding is on a CPU"
        described.table, described.ids = table.data_ptr(), len(table)
    return described


def stack_model(decoder: Decoder, library: NativeLibrary, attention: NativeAttention) -> Stack | None:
    """Return a decoder in one call; None unless it is on one device, with all blocks fused and native attention."""
    table = decoder.embedding
    if len(decoder.stages) > 1 or not isinstance(table, Tensor | CodedEmbedding):
        return None
    if isinstance(table, Tensor) and not (table.is_contiguous() and (table.dtype is torch.float32) == attention.floats):
        return None
    blocks = []
    for layer, block in enumerate(block for stage in decoder.stages for block in stage.blocks):
        fused = block.fused
        if fused is None or fused.o.fused is None or fused.down.fused is None:
            return None
        if block.qk_norm is not None and not attention.norms(layer):
            return None
        blocks.append(StackedBlock(fused.qkv, fused.o.fused, fused.gated, fused.down.fused, block.rotary))
    return Stack(library, decoder, blocks, attention)
