"""The result of a bench, with all that is needed to read it elsewhere: machine, versions, settings and seeds.

A result is rows of numbers. Columns say what the numbers are; a row says what it was measured for (`keys`) and has of
each column one number per repeat, so that medians and spread are taken from it and not kept in their place.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import InvalidRequest
from engine.system.files import replace_file

SCHEMA_VERSION = 1
Key = str | int | float
Setting = str | int | float | bool | None | list[str | int | float]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One number of every row. name: stable, for programs, with its unit where it has one ("median_ttft_ms").

    title: for a person, without the unit.  unit: "ms", "tok/s", "%"; "" for a count or what has none.  digits: after
    the point, where it is shown.  better: which way is better, "" where neither is.  shown: whether the table for a
    person has it; files have all.
    """

    name: str
    title: str
    unit: str = ""
    digits: int = 1
    better: Literal["higher", "lower", ""] = ""
    shown: bool = True


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one thing that was measured. keys: what it is, by key column, as {"users": 4}; no two rows have the
    same.  values: by column one number per repeat, None where that repeat had none (no request of it was answered)."""

    keys: dict[str, Key]
    values: dict[str, list[float | None]]

    def numbers(self, column: str) -> list[float]:
        """The repeats that have a number, in order; none where the row lacks the column."""
        return [value for value in self.values.get(column, ()) if value is not None]

    def median(self, column: str) -> float | None:
        """The middle of the repeats; None where none has a number."""
        numbers = self.numbers(column)
        return statistics.median(numbers) if numbers else None

    def spread(self, column: str) -> tuple[float, float] | None:
        """The least and the most of the repeats; None where none has a number."""
        numbers = self.numbers(column)
        return (min(numbers), max(numbers)) if numbers else None


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A device of the machine that the bench ran on. total_bytes: its memory."""

    id: str
    name: str
    kind: str
    total_bytes: int


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that the bench ran on, which is the clients' alone where the target is elsewhere. cores: those that
    the bench might use."""

    cpu: str
    cores: int
    ram_bytes: int
    system: str = ""
    devices: tuple[DeviceInfo, ...] = ()


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the software that measured, and was measured where the target is the engine. torch: "" where none is there."""

    ericllm: str
    python: str
    torch: str = ""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The target. model: by its given name.  url, dialect: of a server, "" for the engine in this process.

    backend, dtype, weights_bytes: of an engine's model, as it was loaded.
    forces_length: whether an answer had exactly the tokens asked for; where not, rates are of what came.
    counted_by: how tokens were counted: "engine", "usage" (reported), "ids" (one by one), "asked" (a server
    that counts nothing gave what was asked for), or "chunks" (each taken for one).
    """

    kind: Literal["engine", "http"]
    model: str
    url: str = ""
    dialect: str = ""
    backend: str = ""
    dtype: str = ""
    weights_bytes: int = 0
    forces_length: bool = True
    counted_by: str = "engine"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. row, repeat: which row of the result it counts in, and in which repeat.

    sent_s: since the repeat began.  token_s: when each token came, since it was sent.  end_s: when its stream ended,
    since it was sent.  error: one sentence, "" where it was answered.
    """

    row: int
    repeat: int
    sent_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    token_s: list[float] = []
    error: str = ""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Published numbers of others for the same work, on other hardware. values: by column."""

    who: str
    device: str
    source: str
    keys: dict[str, Key] = {}
    values: dict[str, float] = {}


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a bench. name: of the bench ("latency").  started: ISO 8601, UTC.

    complete: False where it was cancelled or failed, and the rows are what there was by then.
    settings: of the target, where they are known, and of the bench.
    keys, columns: of the rows, in the order of the table.  notes: sentences that a reader of the numbers must know.
    """

    name: str
    schema_version: int = SCHEMA_VERSION
    started: str
    duration_s: float
    complete: bool = True
    machine: MachineInfo
    versions: Versions
    target: TargetInfo
    settings: dict[str, Setting]
    seeds: list[int]
    keys: tuple[Column, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def repeats(self) -> int:
        """The most that any row has."""
        return max((len(values) for row in self.rows for values in row.values.values()), default=0)

    def column(self, name: str) -> Column | None:
        """The column of that name."""
        return next((column for column in self.columns if column.name == name), None)


def key_texts(keys: Mapping[str, Key]) -> str:
    """The keys of a row as text: "users 4"."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in keys.items())


def columns_with_numbers(columns: Iterable[Column], rows: Collection[Row]) -> list[Column]:
    """Return the columns of which any row has a number."""
    return [column for column in columns if any(row.numbers(column.name) for row in rows)]


def merge_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """One row for each thing, in the order in which each came first, its repeats in the order in which they came."""
    found: dict[tuple[tuple[str, Key], ...], Row] = {}
    for row in rows:
        place = tuple(row.keys.items())
        before = found.get(place)
        if before is None:
            found[place] = row
            continue
        names = dict.fromkeys((*before.values, *row.values))
        found[place] = Row(
            keys=row.keys, values={name: [*before.values.get(name, ()), *row.values.get(name, ())] for name in names}
        )
    return tuple(found.values())


def encode_result(result: BenchResult) -> bytes:
    """As JSON for a file, which a person can read too."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def decode_result(content: bytes, name: str) -> BenchResult:
    """From JSON. name: what the content is called where it is none. Raises InvalidRequest."""
    try:
        result = msgspec.json.decode(content, type=BenchResult)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(f"{name} is not a bench result: {error}", param="file") from error
    if result.schema_version > SCHEMA_VERSION:
        raise InvalidRequest(
            f"{name} was written by a newer version, with schema {result.schema_version}; this one reads up to "
            f"{SCHEMA_VERSION}",
            param="file",
        )
    return result


def write_file(file: Path, content: bytes, param: str) -> None:
    """Write a result in any form. param: the setting that names the file. Raises InvalidRequest where it cannot be."""
    try:
        replace_file(file, content)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}", param=param) from error


def read_result(file: Path) -> BenchResult:
    """Read one. Raises InvalidRequest where there is none."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}", param="file") from error
    return decode_result(content, str(file))


# Progress of a bench.


class BenchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a bench is. doing: the part that is being measured, in words.  done, total: requests of all parts.

    left_s: seconds to go, None while nothing is known of it.  rows: those that have a repeat at least.
    """

    bench: str
    doing: str
    repeat: int
    repeats: int
    done: int
    total: int
    elapsed_s: float
    left_s: float | None
    keys: tuple[Column, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
