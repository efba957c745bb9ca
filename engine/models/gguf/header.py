"""The header of a GGUF file: metadata by name, and where each tensor lies. Nothing else of the file is read.

The container is that of ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, overload

import msgspec

from engine.config import quote_value
from engine.errors import ModelLoadFailed, UnsupportedModel
from engine.models.files import open_file

SUFFIX = ".gguf"

SPLIT_FIELDS = ("split.no", "split.count", "split.tensors.count")
"""Of each part of a split file: its number from 0 on, how many parts there are, and how many tensors in all of them."""

_MAGIC = int.from_bytes(b"GGUF", "little")
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 48 * 2**20
"""Of all parts of a split file. A vocabulary of 262,144 tokens with their merges takes 15 MiB."""
_MAX_TENSORS = 50_000
"""Likewise."""
_MAX_FIELDS = 10_000
_MAX_NAME_BYTES = 256
"""Of a field or tensor; ggml's own have at most 64."""
_MAX_TEXT_BYTES = 2**20
"""Of a text outside lists: a longer one is passed over. Chat templates have some KiB."""
_MAX_TEXTS_BYTES = 4 * 2**20
"""Of all these."""
_MAX_STRINGS = 10**6
"""In all lists. They are kept as they stand in the file, but one has to be passed to find the next."""
_MAX_DIMENSIONS = 4
_BLOCK_BYTES = 2**18
"""How much of the file is read at a time, the last of which may be weights."""

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
"""By the number of their type in the file."""
_STRING, _LIST = 8, 9

_KIND, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
_PLACES = tuple(struct.Struct(f"<{dimensions}QIQ") for dimensions in range(_MAX_DIMENSIONS + 1))
"""A tensor's sizes, format and offset, by its number of dimensions."""


class BlockFormat(msgspec.Struct, frozen=True):
    """How numbers are stored: `values` of them in `num_bytes`."""

    name: str
    values: int
    num_bytes: int


FORMATS: Mapping[int, BlockFormat] = {
    number: BlockFormat(name, values, num_bytes)
    for number, name, values, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (20, "IQ4_NL", 32, 18),
        (23, "IQ4_XS", 256, 136),
        (30, "BF16", 1, 2),
        (39, "MXFP4", 32, 17),
    )
}
"""Those that are read, by their number in the file (ggml_type)."""

_OTHER_FORMATS: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    40: "NVFP4",
    41: "Q1_0",
}


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor: its shape in torch's order (rows of a matrix first), and where its bytes are in its file."""

    file: Path
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) // self.format.values * self.format.num_bytes


class GgufHeader:
    """A file's metadata and the places of its tensors. Lists stay as they are in the file until they are asked for.

    tensors: by their names in the file.  num_bytes: up to where the last of them is described.
    """

    def __init__(
        self, file: Path, fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor], num_bytes: int = 0
    ) -> None:
        self.file = file
        self.tensors = tensors
        self.fields = fields
        self.num_bytes = num_bytes

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def names(self) -> Iterator[str]:
        """Of the metadata's fields."""
        return iter(self.fields)

    def text(self, name: str, default: str = "") -> str:
        """A text; `default` where there is none. Raises UnsupportedModel for another kind of value."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number, finite; `default` where there is none. Raises UnsupportedModel."""
        value = self.fields.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, "a number")
        return value

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number, likewise."""
        value = self.number(name, default)
        if value is None or isinstance(value, int):
            return value
        raise self._wrong(name, "a whole number")

    def flag(self, name: str, default: bool) -> bool:
        """True or False, likewise."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> Sequence[float] | None:
        """A list of numbers; None where there is none. Raises UnsupportedModel."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, _Numbers):
            return value.view()
        raise self._wrong(name, "a list of numbers")

    def texts(self, name: str) -> Sequence[str] | None:
        """A list of texts, each made when it is asked for; None where there is none. Raises UnsupportedModel for
        another kind of value, the list itself ModelLoadFailed for a text that is not UTF-8."""
        value = self.fields.get(name)
        if value is None or isinstance(value, _Texts):
            return value
        raise self._wrong(name, "a list of texts")

    def _wrong(self, name: str, kind: str) -> UnsupportedModel:
        return UnsupportedModel(f"{quote_value(self.file.name)} has a {name} that is not {kind}", field=name)


def read_gguf(file: Path) -> GgufHeader:
    """The header of one file, its tensors checked: each lies in the file, after the header, and takes none of another's
    bytes.

    Raises ModelLoadFailed for a damaged or unfinished file, UnsupportedModel for one that is not read; OSError.
    """
    return read_parts([file])[0]


def read_parts(files: Sequence[Path]) -> list[GgufHeader]:
    """The headers of a split file's parts, likewise. Those after the first, which has all metadata, have tensors and
    what they say of the split only. Together they take no more than that of a file may."""
    headers: list[GgufHeader] = []
    left_bytes = _MAX_HEADER_BYTES
    for file in files:
        with open_file(file) as stream:
            header = _read(file, _Reader(file, stream, left_bytes))
        left_bytes -= header.num_bytes
        if headers:
            fields = {name: value for name, value in header.fields.items() if name in SPLIT_FIELDS}
            header = GgufHeader(file, fields, header.tensors, header.num_bytes)
        headers.append(header)
        if sum(len(each.tensors) for each in headers) > _MAX_TENSORS:
            raise _too_many(file, _MAX_TENSORS, "tensors")
    return headers


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A list of numbers, as it stands in the header from `start` to `end`."""

    header: bytearray
    start: int
    end: int
    number: struct.Struct

    def view(self) -> Sequence[float]:
        """The numbers."""
        view: Any = memoryview(self.header)
        numbers: Sequence[float] = view[self.start : self.end].cast(self.number.format[1:])
        return numbers


@dataclass(frozen=True, slots=True)
class _Texts(Sequence[str]):
    """A list of texts, as it stands in the header: the length of each and its bytes from `starts` on. Raises
    ModelLoadFailed for a text that is not UTF-8."""

    file: Path
    header: bytearray
    starts: array[int]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text_at(start) for start in self.starts[index]]
        return self._text_at(self.starts[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._text_at, self.starts)

    def _text_at(self, start: int) -> str:
        first = start + _LENGTH.size
        try:
            return self.header[first : first + _LENGTH.unpack_from(self.header, start)[0]].decode()
        except UnicodeDecodeError:
            raise damaged(self.file, "a text of its header is not UTF-8") from None


class _Reader:
    """Takes a header's values one after the other, and reads hardly more of the file than that: `header` begins with
    what it has read, kept whole for the lists in it. The rest of it takes no memory: no page of it is touched.

    Raises ModelLoadFailed where the file ends too early, UnsupportedModel for a header of more than `max_bytes`.
    """

    def __init__(self, file: Path, stream: BufferedReader, max_bytes: int) -> None:
        self.file = file
        self.size = stream.seek(0, 2)
        stream.seek(0)
        self._stream = stream
        self._max_bytes = max_bytes
        self.header = bytearray(min(self.size, max_bytes))
        self._read_bytes = 0
        self.at = 0
        self._strings = 0
        self._text_bytes = 0

    def need(self, end: int) -> None:
        """Read up to `end`, or more."""
        if end > self.size:
            raise damaged(self.file, f"it ends after {self.size:,} bytes, in the middle of its header")
        if end > self._max_bytes:
            raise UnsupportedModel(
                f"{quote_value(self.file.name)} has a header of more than {_MAX_HEADER_BYTES >> 20} MiB, which is not "
                "supported",
                limit=_MAX_HEADER_BYTES,
            )
        while self._read_bytes < end:
            block = memoryview(self.header)[self._read_bytes : self._read_bytes + _BLOCK_BYTES]
            count = self._stream.readinto(block)
            if not count:
                raise damaged(self.file, "it became shorter while it was read")
            self._read_bytes += count

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin; they have been read."""
        start, end = self.at, self.at + count
        if end > self._read_bytes:
            self.need(end)
        self.at = end
        return start

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self.header, self.skip(form.size))

    def count(self) -> int:
        """Of bytes or entries."""
        found: int = self.numbers(_LENGTH)[0]
        return found

    def kind(self) -> int:
        """Of a value, or another number of 32 bits."""
        found: int = self.numbers(_KIND)[0]
        return found

    def text(self, length: int) -> str:
        start = self.skip(length)
        try:
            return self.header[start : self.at].decode()
        except UnicodeDecodeError:
            raise damaged(self.file, "a text of its header is not UTF-8") from None

    def name(self) -> str:
        """Of a field or tensor."""
        length = self.count()
        if length > _MAX_NAME_BYTES:
            raise damaged(self.file, f"its header has a name of {length:,} bytes")
        return self.text(length)

    def value(self, kind: int) -> Any:
        """A value of that type; None for a text that is too long to be kept."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._free_text(self.count())
        if kind == _LIST:
            return self._list(self.kind(), self.count())
        raise damaged(self.file, f"its header has a value of the unknown type {kind}")

    def _free_text(self, length: int) -> str | None:
        if length > _MAX_TEXT_BYTES:
            self.skip(length)
            return None
        self._text_bytes += length
        if self._text_bytes > _MAX_TEXTS_BYTES:
            raise UnsupportedModel(
                f"{quote_value(self.file.name)} has more than {_MAX_TEXTS_BYTES >> 20} MiB of texts in its header, "
                "which is not supported",
                limit=_MAX_TEXTS_BYTES,
            )
        return self.text(length)

    def _list(self, kind: int, count: int) -> _Numbers | _Texts:
        if kind in _NUMBERS:
            number = _NUMBERS[kind]
            return _Numbers(self.header, self.skip(count * number.size), self.at, number)
        if kind == _STRING:
            return self._texts(count)
        if kind == _LIST:
            raise UnsupportedModel(
                f"{quote_value(self.file.name)} has a list of lists in its header, which is not supported"
            )
        raise damaged(self.file, f"its header has a list of the unknown type {kind}")

    def _texts(self, count: int) -> _Texts:
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise _too_many(self.file, _MAX_STRINGS, "texts in its header")
        header, at, end, starts = self.header, self.at, self._read_bytes, array("I")
        length_at = _LENGTH.unpack_from
        for _ in range(count):  # there may be half a million
            if at + 8 > end:
                self.need(at + 8)
                end = self._read_bytes
            starts.append(at)
            at += 8 + length_at(header, at)[0]
        self.skip(at - self.at)
        return _Texts(self.file, header, starts)


def _read(file: Path, reader: _Reader) -> GgufHeader:
    if reader.size < _KIND.size or reader.kind() != _MAGIC:
        raise damaged(file, "it does not begin with GGUF")
    version = reader.kind()
    if version not in _VERSIONS:
        if version and not version & 0xFFFF:
            raise UnsupportedModel(f"{quote_value(file.name)} is big-endian, which is not supported")
        raise UnsupportedModel(
            f"{quote_value(file.name)} is of GGUF's version {version}; {' and '.join(map(str, _VERSIONS))} are read",
            version=version,
        )
    num_tensors, num_fields = reader.count(), reader.count()
    for what, count, most in (("tensors", num_tensors, _MAX_TENSORS), ("fields", num_fields, _MAX_FIELDS)):
        if count > most:
            raise _too_many(file, most, what)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.name()
        if name in fields:
            raise damaged(file, f"its header has {quote_value(name)} twice")
        fields[name] = reader.value(reader.kind())
    tensors = _read_tensors(file, reader, num_tensors)
    start = _data_start(file, reader.at, fields.get("general.alignment", _DEFAULT_ALIGNMENT))
    for tensor in tensors.values():
        msgspec.structs.force_setattr(tensor, "offset", start + tensor.offset)
    _check_places(file, tensors, reader.size)
    return GgufHeader(file, fields, tensors, reader.at)


def _read_tensors(file: Path, reader: _Reader, count: int) -> dict[str, GgufTensor]:
    """The tensors, their offsets from where the weights begin."""
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = reader.name()
        if name in tensors:
            raise damaged(file, f"it has the tensor {quote_value(name)} twice")
        dimensions = reader.kind()
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise damaged(file, f"its tensor {quote_value(name)} has {dimensions} dimensions")
        *sizes, number, offset = reader.numbers(_PLACES[dimensions])
        shape = tuple(reversed(sizes))
        kind = FORMATS.get(number)
        if kind is None:
            other = _OTHER_FORMATS.get(number, f"type {number}")
            raise UnsupportedModel(
                f"the tensor {quote_value(name)} in {quote_value(file.name)} is stored as {other}; "
                f"{', '.join(each.name for each in FORMATS.values())} are read",
                format=other,
            )
        if 0 in shape:
            raise damaged(file, f"its tensor {quote_value(name)} has no numbers")
        if shape[-1] % kind.values:
            raise damaged(
                file,
                f"its tensor {quote_value(name)} of {kind.name} has rows of {shape[-1]}, which blocks of {kind.values} "
                "do not fill",
            )
        tensors[name] = GgufTensor(file, shape, kind, offset)
    return tensors


def _data_start(file: Path, header_bytes: int, alignment: object) -> int:
    """Where the weights begin."""
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise damaged(file, "its general.alignment is no power of two")
    return -(-header_bytes // alignment) * alignment


def _check_places(file: Path, tensors: Mapping[str, GgufTensor], size: int) -> None:
    reached = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
        if tensor.offset < reached:
            raise damaged(file, f"its tensor {quote_value(name)} overlaps another")
        reached = tensor.offset + tensor.num_bytes
        if reached > size:
            raise ModelLoadFailed(
                f"{quote_value(file.name)} is truncated or damaged: it has {size} bytes, and its tensor "
                f"{quote_value(name)} ends at {reached}",
                file_bytes=size,
                promised_bytes=reached,
            )


def _too_many(file: Path, most: int, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{quote_value(file.name)} has more than {most:,} {what}, which is not supported", limit=most
    )


def damaged(file: Path, why: str) -> ModelLoadFailed:
    """The refusal of a file that is not what its header says."""
    return ModelLoadFailed(f"{quote_value(file.name)} is damaged: {why}", file=quote_value(file.name))
