"""The headers of a folder's safetensors files: every tensor's name, dtype and shape, without reading a tensor.

A file is an 8-byte little-endian length, a JSON object of that length and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from io import BufferedReader
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import msgspec

from engine.config import quote_value
from engine.errors import ModelLoadFailed, UnsafeWeights, UnsupportedModel
from engine.models.files import file_names, open_file, read_json, refuse_wide_text

MAX_TENSORS = 190_000
"""In a model folder. EXL2 weights of 94 layers of 128 experts, as Qwen3-235B's, come to 181,000."""

_MAX_FILE_TENSORS = 100_000
"""In one file, whose header is decoded in one go."""

_MAX_HEADER_BYTES = 32 * 2**20
"""Of one file: each of that many tensors may have a name of 200 characters."""

_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 2**48
"""More numbers than any disk holds; a tensor without any may have a dimension as large, next to one of 0."""

_MAX_INDEX_BYTES = 32 * 2**20
_MAX_INDEX_VALUES = 2 * MAX_TENSORS + 1000
_LENGTH_BYTES = 8
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ".safetensors"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Of one number, by its dtype: all that the format has."""

_Dimension = Annotated[int, msgspec.Meta(ge=0, le=_MAX_DIMENSION)]
_Offset = Annotated[int, msgspec.Meta(ge=0)]


class TensorHeader(msgspec.Struct, frozen=True, gc=False):
    """One tensor: dtype in safetensors' words ("BF16"), its shape, and where it begins and ends behind the header."""

    dtype: str = ""
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)] = ()
    data_offsets: tuple[_Offset, _Offset] = (0, 0)

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Its size in the file."""
        begin, end = self.data_offsets
        return end - begin


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


_HEADER = msgspec.json.Decoder(dict[str, TensorHeader])


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: those its index names, or all. Raises UnsafeWeights where there are only
    pickles, UnsupportedModel where there are no weights, ModelLoadFailed where files of the index are missing, OSError
    where the folder cannot be read."""
    names = file_names(folder)
    if _INDEX in names:
        return [folder / name for name in _indexed_files(folder, names)]
    files = [folder / name for name in names if name.endswith(_WEIGHTS)]
    if files:
        return files
    pickle = next((name for name in names if Path(name).suffix in _PICKLES), None)
    if pickle is not None:
        raise UnsafeWeights(
            f"{quote_value(pickle)} is a pickle, which can run code when read; convert the model to safetensors",
            file=quote_value(pickle),
        )
    raise UnsupportedModel("the folder holds no weights: it has no *.safetensors file")


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """The tensors of a model's files by name, a later file's where two have one of the same name.

    Raises ModelLoadFailed for a damaged or unfinished file, UnsupportedModel for one that is not read or more than
    MAX_TENSORS, OSError.
    """
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors |= read_header(file)
        if len(tensors) > MAX_TENSORS:
            raise UnsupportedModel(
                f"the weight files in {file.parent} hold more than {MAX_TENSORS:,} tensors, which is not supported",
                limit=MAX_TENSORS,
            )
    return tensors


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name: they cover all that comes after the header, without gap or overlap,
    and each takes what its shape and dtype make it.

    Raises ModelLoadFailed for a damaged or unfinished file, UnsupportedModel for one that is not read; OSError.
    """
    with open_file(file) as stream:
        size, header = _read_bytes(file, stream)
    try:
        tensors = _HEADER.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, f"its header is not valid: {quote_value(str(error), 200)}") from error
    tensors.pop("__metadata__", None)
    places = [tensor.data_offsets for tensor in tensors.values()]
    promised = _LENGTH_BYTES + len(header) + max(map(itemgetter(1), places), default=0)
    if promised != size:
        raise ModelLoadFailed(
            f"{quote_value(file.name)} is truncated or damaged: it has {size} bytes, {promised} expected",
            file_bytes=size,
            promised_bytes=promised,
        )
    _check_places(file, tensors, places)
    return tensors


def _indexed_files(folder: Path, present: list[str]) -> list[str]:
    """The files that the index names. Raises ModelLoadFailed, UnsupportedModel."""
    try:
        needed = sorted(set(_read_index(folder).weight_map.values()))
    except FileNotFoundError:
        raise ModelLoadFailed(f"{_INDEX} in {folder} is a broken link", file=_INDEX) from None
    if not needed:
        raise ModelLoadFailed(f"{_INDEX} in {folder} does not say which files hold the weights")
    for name in needed:
        if "/" in name or not name.endswith(_WEIGHTS):
            raise ModelLoadFailed(
                f"{_INDEX} names {quote_value(name)}, which is not a safetensors file in the same folder"
            )
    if missing := sorted(set(needed) - set(present)):
        raise ModelLoadFailed(
            f"{len(missing)} of {len(needed)} weight files are missing, {quote_value(missing[0])} first",
            file=quote_value(missing[0]),
        )
    return needed


def _read_index(folder: Path) -> _Index:
    return read_json(folder / _INDEX, _Index, max_bytes=_MAX_INDEX_BYTES, max_values=_MAX_INDEX_VALUES)


def _read_bytes(file: Path, stream: BufferedReader) -> tuple[int, bytes]:
    """The file's size and its header."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    start = stream.read(_LENGTH_BYTES)
    if start == b"version ":
        raise ModelLoadFailed(
            f"{quote_value(file.name)} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
        )
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
        raise _damaged(file, "it does not begin with a safetensors header")
    if length > _MAX_HEADER_BYTES:
        raise UnsupportedModel(
            f"{quote_value(file.name)} has a header of {length} bytes; more than {_MAX_HEADER_BYTES} are not supported",
            limit=_MAX_HEADER_BYTES,
        )
    header = stream.read(length)
    # A tensor is an object, and has a comma for each of its dimensions and three more.
    if header.count(b"{") > _MAX_FILE_TENSORS or header.count(b",") > _MAX_FILE_TENSORS * (_MAX_DIMENSIONS + 4):
        raise UnsupportedModel(
            f"{quote_value(file.name)} holds more than {_MAX_FILE_TENSORS:,} tensors, which is not supported",
            limit=_MAX_FILE_TENSORS,
        )
    refuse_wide_text(header, file)
    return size, header


def _check_places(file: Path, tensors: Mapping[str, TensorHeader], places: list[tuple[int, int]]) -> None:
    reached = 0
    for begin, end in sorted(places):
        if begin != reached:
            raise _damaged(file, f"its tensors overlap or leave a gap at byte {min(begin, reached)} after the header")
        reached = end
    replace = msgspec.structs.force_setattr
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    dtype, bits = "", -1
    shape: tuple[int, ...] = (-1,)
    for name, tensor in tensors.items():  # there may be a hundred thousand, most of them alike
        begin, end = tensor.data_offsets
        if tensor.shape != shape or tensor.dtype != dtype:  # not like the one before
            key = tensor.dtype, tensor.shape
            if (kind := kinds.get(key)) is None:
                bits = math.prod(tensor.shape) * _BITS[tensor.dtype] if tensor.dtype in _BITS else -1
                kind = kinds[key] = sys.intern(tensor.dtype), tensor.shape, bits
            dtype, shape, bits = kind
        if bits != 8 * (end - begin):
            raise _damaged(file, _mismatch(name, tensor))
        replace(tensor, "dtype", dtype)  # each would be kept
        replace(tensor, "shape", shape)


def _mismatch(name: str, tensor: TensorHeader) -> str:
    if tensor.dtype not in _BITS:
        return f"its tensor {quote_value(name)} has an unknown dtype, {quote_value(tensor.dtype)}"
    return (
        f"its tensor {quote_value(name)} of {tensor.dtype} and shape {list(tensor.shape)} does not take "
        f"{tensor.stored_bytes} bytes"
    )


def _damaged(file: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"{quote_value(file.name)} is damaged: {why}", file=quote_value(file.name))
