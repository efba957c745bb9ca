"""The weights of a model folder's safetensors files or of a GGUF file: headers first, tensors when asked for; sharded
or not, never pickles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.checkpoints.gguf import read_codes, read_piece
from engine.config import quote_value
from engine.errors import ModelLoadFailed
from engine.models.files import open_file
from engine.models.gguf.file import GgufModel, Piece, is_gguf
from engine.models.headers import read_header, weight_files

_STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4, "I16": 2}

REOPEN_BYTES = 256 << 20
"""How much is read of an open file before it is closed: until then, that counts as this process's memory."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what it is; `kind` is its dtype in safetensors' words.

    stored_as: its name in the file, where that is another.  at: the part of that tensor that it is, where not all.
    piece: what it is made of in a GGUF file, whose formats `kind` may name too.
    """

    file: Path
    shape: tuple[int, ...]
    kind: str
    stored_as: str = ""
    at: tuple[int | slice, ...] = ()
    piece: Piece | None = None

    @property
    def stored_bytes(self) -> int:
        """Its size in the file, for a dtype that is read."""
        if self.piece is not None:
            return self.piece.num_bytes
        return math.prod(self.shape) * _STORED_BYTES.get(self.kind, 0)

    def matrix(self, index: int, first: int, rows: int) -> TensorInfo:
        """Of a tensor of matrices, `rows` rows from `first` on of the one at `index`."""
        return replace(self, shape=(rows, self.shape[2]), at=(index, slice(first, first + rows)))


class Checkpoint:
    """The tensors of a model folder, known by their headers until they are read."""

    def __init__(self, tensors: dict[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._file = _LastFile()

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers. Raises UnsafeWeights, UnsupportedModel or ModelLoadFailed, naming the file."""
        try:
            if is_gguf(folder):
                pieces = GgufModel(folder).pieces
                return cls(
                    {
                        name: TensorInfo(piece.tensor.file, piece.shape, piece.tensor.format.name, piece=piece)
                        for name, piece in pieces.items()
                    }
                )
            return cls(
                {
                    name: TensorInfo(file, header.shape, header.dtype)
                    for file in weight_files(folder)
                    for name, header in read_header(file).items()
                }
            )
        except OSError as error:
            raise ModelLoadFailed(f"the weights in {folder} cannot be read: {error.strerror}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """The tensors' names."""
        return iter(self._tensors)

    def pieces(self) -> dict[str, Piece]:
        """Return the parts of a GGUF file that they are made of, by name; none for a folder."""
        return {name: info.piece for name, info in self._tensors.items() if info.piece is not None}

    @property
    def files(self) -> frozenset[Path]:
        """The files that hold them."""
        return frozenset(tensor.file for tensor in self._tensors.values())

    def with_pieces(self, pieces: Mapping[str, TensorInfo]) -> Checkpoint:
        """These tensors, and some of them or their parts under further names."""
        return Checkpoint({**self._tensors, **pieces})

    def info(self, name: str) -> TensorInfo:
        """Header of a tensor. Raises ModelLoadFailed where there is none of that name."""
        if name not in self._tensors:
            raise ModelLoadFailed(f"the weights lack the tensor {name}", tensor=name)
        return self._tensors[name]

    def read(self, *names: str, decoded: torch.dtype = torch.float16) -> list[Tensor]:
        """The named tensors as they are stored, on the CPU, or as `decoded` where they are a GGUF file's codes.

        Raises ModelLoadFailed naming the tensor that is missing or the file that cannot be read.
        """
        return [self._read(self.info(name), name, decoded) for name in names]

    def read_ranges(self, name: str, dim: int, ranges: Sequence[range]) -> Tensor:
        """Return these ranges of a tensor of a safetensors file along a dimension, in order, reading nothing else of
        it. Raises as `read`."""
        info = self.info(name)
        whole = [slice(None)] * dim
        try:
            stored = self._file.open(info).get_slice(info.stored_as or name)
            parts: list[Tensor] = [stored[(*whole, slice(each.start, each.stop))] for each in ranges]
        except (SafetensorError, OSError, IndexError) as error:
            raise _damaged(info.file, error) from None
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        expected = (*info.shape[:dim], sum(map(len, ranges)), *info.shape[dim + 1 :])
        if tensor.shape != expected or tensor.dtype.itemsize != _STORED_BYTES.get(info.kind):
            raise _changed(info, name)
        return tensor

    def read_codes(self, name: str) -> Tensor:
        """The rows of a GGUF file's tensor as the file has them, uint8 [rows, bytes of a row]. Raises as `read`."""
        info = self.info(name)
        assert info.piece is not None, "a tensor of a GGUF file"
        try:
            return read_codes(info.piece)
        except OSError as error:
            raise _damaged(info.file, error) from None

    def _read(self, info: TensorInfo, name: str, decoded: torch.dtype) -> Tensor:
        if info.piece is not None:
            try:
                return read_piece(info.piece, decoded)
            except OSError as error:
                raise _damaged(info.file, error) from None
        stored_as = info.stored_as or name
        try:
            opened = self._file.open(info)
            tensor: Tensor = opened.get_slice(stored_as)[info.at] if info.at else opened.get_tensor(stored_as)
        except (SafetensorError, OSError, IndexError) as error:
            raise _damaged(info.file, error) from None
        # The file was opened again. What computes with a tensor goes by its shape, the native kernels without looking.
        if tensor.shape != info.shape or tensor.nbytes != info.stored_bytes:
            raise _changed(info, name)
        return tensor


class _LastFile:
    """The file that was read last, open: parsing a header of thousands of experts for each of them would take longer
    than reading them."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._opened: Any = None
        self._read_bytes = 0

    def open(self, info: TensorInfo) -> Any:
        """The file that `info` lies in, to read that tensor from.

        Raises SafetensorError, UnsupportedModel or OSError.
        """
        if info.file != self._path or self._read_bytes > REOPEN_BYTES:
            self._path = self._opened = None
            with open_file(info.file) as stream:
                self._opened = safe_open(f"/dev/fd/{stream.fileno()}", framework="pt")
            self._path, self._read_bytes = info.file, 0
        self._read_bytes += info.stored_bytes
        return self._opened


def _changed(info: TensorInfo, name: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{quote_value(info.file.name)} in {info.file.parent} has changed while it was read: its tensor "
        f"{quote_value(name)} is another one now",
        file=quote_value(info.file.name),
    )


def _damaged(file: Path, error: Exception) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{quote_value(file.name)} in {file.parent} is damaged or truncated: {quote_value(str(error), 200)}",
        file=quote_value(file.name),
    )
