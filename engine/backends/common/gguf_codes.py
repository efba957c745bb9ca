"""Weights that kernels compute from as their files have them: which they are, how the blocks of a GGUF file lie on a
CPU and what they take there and on CUDA. Integers alone: nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from engine.backends.common.families import architectures
from engine.backends.common.families.base import TensorNames
from engine.backends.common.model_config import ModelConfig
from engine.config import ModelSpec
from engine.models.gguf.file import Piece
from engine.models.gguf.header import FORMATS

BLOCK_OUTPUTS = 16
_GROUP_INPUTS = 32
_VECTOR_BYTES = 64
_PLACE_BYTES = 16


class _Layout(NamedTuple):
    """Of a format in native/gguf.h. bits: of a code.  groups: of 32 inputs in a record.  scale_bytes: of a record."""

    bits: int
    groups: int
    scale_bytes: int

    def block_bytes(self, inputs: int) -> int:
        """Of 16 outputs."""
        records = -(-inputs // (_GROUP_INPUTS * self.groups))
        return records * (self.scale_bytes + self.groups * self.bits * _VECTOR_BYTES)


_HALVES, _HALVES_AND_MINIMA, _WHOLE = (2, 64), (1, 64), (8, 320)
_LAYOUTS: Mapping[str, _Layout] = {
    "Q8_0": _Layout(8, *_HALVES),
    "Q4_0": _Layout(4, *_HALVES),
    "Q4_1": _Layout(4, *_HALVES_AND_MINIMA),
    "Q5_0": _Layout(5, *_HALVES),
    "Q5_1": _Layout(5, *_HALVES_AND_MINIMA),
    "Q4_K": _Layout(4, *_WHOLE),
    "Q5_K": _Layout(5, *_WHOLE),
    "Q6_K": _Layout(6, *_WHOLE),
}
CODED_FORMATS = tuple(_LAYOUTS)
"""The formats that the kernels compute from, numbered as in native/gguf.h."""

FOUR_BIT_FORMATS = ("GPTQ", "AWQ")
FLOAT_FORMATS = ("F8_E4M3", "F8_E5M2")
"""Formats of a model folder that the kernels of CUDA compute from."""


class Codes(NamedTuple):
    """A matrix of the file, [rows, inputs], in one of CODED_FORMATS, or in one of a model folder's (`packed_codes`).

    Of a folder's: span: groups of 32 inputs that share a scale, and row_span: rows.  ordered: the inputs may be in
    another order than those of x.  rounds_x: the model is meant for x in 8-bit floats, a scale for each row.
    """

    format: str
    rows: int
    inputs: int
    span: int = 1
    row_span: int = 1
    ordered: bool = False
    rounds_x: bool = False

    @property
    def elements(self) -> int:
        """Its weights."""
        return self.rows * self.inputs

    @property
    def kind(self) -> Codes:
        """Constants of its compiled kernels: the codes without sizes."""
        return self._replace(rows=0, inputs=0, ordered=False, rounds_x=False)

    @property
    def cuda_bytes(self) -> int:
        """The bytes that it takes on CUDA: those in the file, but for the half of a pair of groups that some rows of 4
        or 5 bits lack, and for zero points, which are not packed."""
        groups = -(-self.inputs // _GROUP_INPUTS)
        pairs = -(-groups // 2) * _GROUP_INPUTS * self.rows
        spans = -(-groups // self.span)
        if self.format in FOUR_BIT_FORMATS:
            return pairs + spans * self.rows * 3 + self.ordered * self.inputs * 4
        if self.format in FLOAT_FORMATS:
            return self.elements + spans * -(-self.rows // self.row_span) * 4
        block = _BLOCKS[self.format]
        lone = self.format in _PAIRED and groups % 2
        return self.rows * (self.inputs // block.values * block.num_bytes + lone * _GROUP_INPUTS // 2)


class Places(NamedTuple):
    """Where the blocks of a layer lie: for each the number of its format and its offset. num_bytes: of all."""

    blocks: tuple[tuple[int, int], ...]
    num_bytes: int


def place_blocks(parts: Sequence[Codes], *, gates: bool = False) -> Places | None:
    """Where the blocks of a layer lie whose outputs are the rows of `parts`, one after the other; None where a block
    would have outputs of two formats.

    gates: blocks of the first and the second half of the outputs take turns.
    """
    runs = [_runs(half) for half in _halves(parts, gates)]
    if None in runs:
        return None
    columns = [[name for name, blocks in run or () for _ in range(blocks)] for run in runs]
    formats = [name for row in zip(*columns, strict=True) for name in row]
    offset = _table_bytes(len(formats))
    blocks = []
    for name in formats:
        blocks.append((CODED_FORMATS.index(name), offset))
        offset += _LAYOUTS[name].block_bytes(parts[0].inputs)
    return Places(tuple(blocks), offset)


def coded_bytes(parts: Sequence[Codes], *, gates: bool = False) -> int | None:
    """Return the bytes they take as one layer; None where `place_blocks` finds no places. Quick for any sizes."""
    total = count = 0
    for half in _halves(parts, gates):
        runs = _runs(half)
        if runs is None:
            return None
        count += sum(blocks for _, blocks in runs)
        total += sum(blocks * _LAYOUTS[name].block_bytes(parts[0].inputs) for name, blocks in runs)
    return _table_bytes(count) + total


def _runs(parts: Sequence[Codes]) -> list[tuple[str, int]] | None:
    """The blocks of outputs that are the rows of `parts`: formats and how many are next to each other; None where a
    block would have two formats."""
    runs: list[tuple[str, int]] = []
    for part in parts:
        if runs and runs[-1][0] == part.format:
            runs[-1] = (part.format, runs[-1][1] + part.rows)
        else:
            runs.append((part.format, part.rows))
    if any(rows % BLOCK_OUTPUTS for _, rows in runs[:-1]):
        return None
    return [(name, -(-rows // BLOCK_OUTPUTS)) for name, rows in runs]


def _halves(parts: Sequence[Codes], gates: bool) -> list[list[Codes]]:
    """The parts, or with gates those of the first and of the second half of the outputs."""
    if not gates:
        return [list(parts)]
    left = sum(part.rows for part in parts) // 2
    halves: list[list[Codes]] = [[], []]
    for part in parts:
        first = min(left, part.rows)
        left -= first
        for half, rows in zip(halves, (first, part.rows - first), strict=True):
            if rows:
                half.append(part._replace(rows=rows))
    return halves


def _table_bytes(blocks: int) -> int:
    return -(-blocks * _PLACE_BYTES // _VECTOR_BYTES) * _VECTOR_BYTES


Target = Literal["cpu", "cuda"]
"""Devices whose kernels compute from codes; each lays them out in its own way."""

CODES_CAPABILITY = (8, 0)
"""The least compute capability whose kernels compute from codes: Ampere, the oldest that Triton supports. Models are
decoded at load on older cards."""

SLAB_BYTES = 64 << 20
"""Weights that are decoded at a time on CUDA, for steps of many rows."""

_BLOCKS = {block.name: block for block in FORMATS.values()}
_PAIRED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Formats whose rows may have an odd number of groups of 32 inputs, two of which share bytes on CUDA."""


def triton_problem() -> str:
    """Return why Triton cannot compile kernels on this machine, as a clause; "" where nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("clang", "gcc"))) and os.name != "nt":
        return "no C compiler for Triton is on PATH (clang, gcc)"
    return ""


class CodedSizes(NamedTuple):
    """Sizes of a model that is computed from codes. layers: for each, the weights of its linear layers that are,
    and their bytes.  embedding_bytes, head_bytes: likewise; None where it is decoded. A tied head is the embedding."""

    layers: tuple[tuple[int, int], ...]
    embedding_bytes: int | None
    head_bytes: int | None

    def saved_bytes(self, layer: int, item_bytes: int) -> int:
        """By how much less a layer takes than with `item_bytes` for every weight."""
        elements, size_bytes = self.layers[layer]
        return item_bytes * elements - size_bytes


class CodedTensors:
    """The matrices of a model in codes, by their names in a model folder, as the kernels of `target` take them."""

    def __init__(self, tensors: Mapping[str, Codes], target: Target = "cpu") -> None:
        self._tensors, self._target = tensors, target

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @classmethod
    def of(cls, pieces: Mapping[str, Piece], target: Target = "cpu") -> CodedTensors:
        """Those of a GGUF file's model."""
        return cls(
            {
                name: Codes(piece.tensor.format.name, *piece.shape)
                for name, piece in pieces.items()
                if piece.tensor.format.name in _LAYOUTS and len(piece.shape) == 2
            },
            target,
        )

    @property
    def kinds(self) -> tuple[Codes, ...]:
        """Each `Codes.kind`, in a fixed order."""
        return tuple(sorted({codes.kind for codes in self._tensors.values()}))

    def parts(self, names: Sequence[str], *, gates: bool = False) -> tuple[Codes, ...] | None:
        """The tensors of one linear layer; None where the kernels do not compute from all of them."""
        found = tuple(self._tensors[name] for name in names if name in self._tensors)
        if len(found) < len(names) or len({part.inputs for part in found}) != 1:
            return None
        return None if self._num_bytes(found, gates=gates) is None else found

    def sizes(self, config: ModelConfig, *, tied: bool) -> CodedSizes:
        """Add them up. tied: the head is the embedding. Takes as long as there are tensors, whatever `config` says."""
        names = architectures()[config.architecture].names
        layers = []
        for layer in range(config.layers):
            elements = size_bytes = 0
            for linear, gates in self._linears(config, names, layer):
                parts = self.parts(linear, gates=gates)
                if parts is not None:
                    elements += sum(part.elements for part in parts)
                    size_bytes += self._num_bytes(parts, gates=gates) or 0
            layers.append((elements, size_bytes))
        embedding, head = (
            None if parts is None else self._num_bytes(parts)
            for parts in (self.parts([f"{names.embedding}.weight"]), self.parts([f"{names.head}.weight"]))
        )
        return CodedSizes(tuple(layers), embedding, embedding if tied else head)

    def _num_bytes(self, parts: Sequence[Codes], *, gates: bool = False) -> int | None:
        return sum(part.cuda_bytes for part in parts) if self._target == "cuda" else coded_bytes(parts, gates=gates)

    def _linears(self, config: ModelConfig, names: TensorNames, layer: int) -> Iterator[tuple[list[str], bool]]:
        """The tensors of each linear layer of a block, and whether the first half of its outputs gates the second."""
        prefix, own = names.layer.format(layer), names.experts
        experts = config.traits.experts_of(layer)
        groups: list[tuple[Sequence[str], bool]] = [(names.qkv, False), ((names.o,), False)]
        if experts is None:
            groups += [(names.gate_up, True), ((names.down,), False)]
        for parts, gates in groups:
            yield [f"{prefix}.{part}.weight" for part in parts], gates
        if experts is None:
            return
        for stem in chain((own.shared,), map(own.expert.format, range(experts.count))):
            gate, up, down = (f"{prefix}.{stem}.{part}.weight" for part in (own.gate, own.up, own.down))
            if stem != own.shared and not any(name in self._tensors for name in (gate, up, down)):
                return  # the metadata may count any number
            yield [gate, up], True
            yield [down], False


NO_CODES = CodedTensors({})


def computes_from_codes(spec: ModelSpec, target: Target = "cpu", *, dtype: str = "") -> bool:
    """Return whether a load on a device with kernels leaves weights in the codes of their files: unless it asks for
    fewer bits, for an adapter in the weights, for tensor parallelism, for a dtype in which no kernel computes, or for
    none.

    dtype: that the model computes in, which decides on CUDA.
    """
    if (spec.weights, spec.lora, spec.tensor_parallel_size) != ("auto", None, 1):
        return False
    if target == "cuda":
        return dtype in ("float16", "bfloat16")
    return spec.dtype != "float16" and spec.native is not False
