"""Writing safetensors files tensor by tensor: every shape is known beforehand, so no more than one is in memory.

A file is an 8-byte little-endian length, a JSON object of that length and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import torch
from torch import Tensor

SHARD_BYTES = 8 << 30
_KINDS = {torch.float16: "F16", torch.int16: "I16", torch.int32: "I32"}
_LENGTH_BYTES = _ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    header: bytes
    offsets: Mapping[str, int]
    """Where in the file each tensor begins."""
    file_bytes: int


class ShardedWriter:
    """Files of at most about `shard_bytes` under the names that ExLlamaV2 gives them. A context manager.

    Each tensor of `specs` is written once, in any order; leaving without having written one is an error.
    Raises OSError as the disk does.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._specs = {spec.name: spec for spec in specs}
        self._shards = plan_shards(specs, shard_bytes)
        self._missing = set(self._specs)
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for shard in self._shards:
                file = opened.enter_context((self._folder / shard.file).open("xb"))
                file.write(shard.header)
                file.truncate(shard.file_bytes)
                self._places |= {name: (file, offset) for name, offset in shard.offsets.items()}
            self._files = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        if kind is None and self._missing:
            raise AssertionError(f"never written: {', '.join(sorted(self._missing))}")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put `tensor` at its place."""
        spec = self._specs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{name} is not as planned"
        file, offset = self._places[name]
        self._missing.remove(name)
        data = tensor.contiguous()
        file.seek(offset)
        file.write((ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr()))


def files_bytes(specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> int:
    """Size of all files together, headers included."""
    return sum(shard.file_bytes for shard in plan_shards(specs, shard_bytes))


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> tuple[_Shard, ...]:
    """Spread tensors over files in order. A tensor that is larger than `shard_bytes` gets a file of its own."""
    parts = list(_split(specs, shard_bytes))
    if len(parts) == 1:
        return (_shard("output.safetensors", parts[0]),)
    names = (f"output-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1))
    return tuple(_shard(name, part) for name, part in zip(names, parts, strict=True))


def _split(specs: Sequence[TensorSpec], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    part: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if part and size + spec.stored_bytes > shard_bytes:
            yield part
            part, size = [], 0
        part.append(spec)
        size += spec.stored_bytes
    yield part


def _shard(file: str, specs: Sequence[TensorSpec]) -> _Shard:
    """Lay tensors out, wide elements first: each lies at a multiple of its element's size then."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        begins[spec.name], end = end, end + spec.stored_bytes
        offsets = (begins[spec.name], end)
        entries[spec.name] = {"dtype": _KINDS[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(header)
    return _Shard(
        file=file,
        header=len(header).to_bytes(_LENGTH_BYTES, "little") + header,
        offsets={name: start + begin for name, begin in begins.items()},
        file_bytes=start + end,
    )
