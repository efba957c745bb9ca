"""The file: an SQLite database. What is in it is here; `writer` and `reader` say how it gets there and back.

A frame of each segment, the first, is whole; the others are what changed since the one before. A whole frame has no
history: next to it lie the seconds that came since the last one, and those of the segment are in its changes. All is
msgpack, deflated, each frame of a segment with those before it as its dictionary.
"""

from __future__ import annotations

import math
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from console.link.bounded_decode import MAX_MSGPACK_BYTES, decode_msgpack
from engine.config import quote_value
from engine.errors import EngineError
from engine.models.files import is_file
from engine.system.files import make_private_file

APPLICATION_ID = 0x45524943
VERSION = 1
SEGMENT_S = 60.0
SEGMENT_BYTES = 8 * 2**20
"""Of a segment's frames before they are deflated, after which the next one begins: a jump reads one segment."""

MAX_SEGMENT_BYTES = 32 * 2**20
"""Read of one; those of earlier versions ended by time alone."""

MAX_SEGMENT_VALUES = 4 * 10**6
"""In one: half a second's work."""

MAX_BLOB_BYTES = 2 * MAX_MSGPACK_BYTES
"""Of one value of the database, deflated."""

_STEPS_PER_BYTE = 1
_MIN_STEPS = 10**6
_LOOK_STEPS = 10_000
"""Of SQLite's machine, for one query: a row takes ten of them, and as many bytes of the file, unless its pages are used
many times over."""

_SCHEMA = """
CREATE TABLE frames (id INTEGER PRIMARY KEY, at REAL NOT NULL, segment INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE seconds (segment INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE lines (id INTEGER PRIMARY KEY, at REAL NOT NULL, level INTEGER NOT NULL, source TEXT NOT NULL,
    message TEXT NOT NULL);
CREATE INDEX lines_at ON lines (at);
"""
_DICTIONARY_BYTES = 32 * 1024
"""Deflate looks back no further."""

_PAGE_BYTES = 16 * 1024
"""Several frames lie in one, so little of it is left empty."""

_LEVEL = 9
_KEPT = 2.0**17
_LARGEST_ROUNDED = 1e8


class RecordingUnusable(EngineError):
    """The file is not a recording, is damaged, or cannot be written; the message says which."""

    code = "recording_unusable"
    http_status = 400


class Packer:
    """One segment's values, small: each is deflated with those before it as its dictionary, for they are alike.

    num_bytes: of those so far, before they were deflated.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_values = 0
        self._seen = b""

    def pack(self, value: object) -> bytes:
        """A plain value. Numbers are kept to five digits, as no screen shows more.

        Raises RecordingUnusable for one that is more than `unpack` takes.
        """
        raw = msgspec.msgpack.encode(round_fractions(value))
        if len(raw) > MAX_MSGPACK_BYTES:
            raise RecordingUnusable(
                f"Too much to record: {len(raw) / 2**20:.1f} MiB at once, of {MAX_MSGPACK_BYTES // 2**20} MiB"
            )
        compressor = zlib.compressobj(_LEVEL, zdict=self._seen)
        data = compressor.compress(raw) + compressor.flush()
        self._look_back(raw)
        return data

    def unpack(self, data: object) -> Any:
        """Unpack the output of another Packer, in the same order.

        Raises ValueError or zlib.error for what is damaged, or more than one makes.
        """
        if not isinstance(data, bytes):
            raise ValueError("a value is missing")
        decompressor = zlib.decompressobj(zdict=self._seen)
        raw = decompressor.decompress(data, MAX_MSGPACK_BYTES + 1)
        if not decompressor.eof or len(raw) > MAX_MSGPACK_BYTES:
            raise ValueError("a value is cut off, or too long")
        self._look_back(raw)
        value, count = decode_msgpack(raw)
        self._num_values += count
        if self.num_bytes > MAX_SEGMENT_BYTES or self._num_values > MAX_SEGMENT_VALUES:
            raise ValueError("a segment is too long")
        return value

    def _look_back(self, raw: bytes) -> None:
        self.num_bytes += len(raw)
        self._seen = (self._seen + raw)[-_DICTIONARY_BYTES:]


def round_fractions(value: Any) -> Any:
    """Fractions to 17 significant bits (five digits), which deflate well; unix times stay whole."""
    if isinstance(value, float):
        if not 0 < abs(value) < _LARGEST_ROUNDED:
            return value
        mantissa, exponent = math.frexp(value)
        return math.ldexp(round(mantissa * _KEPT), exponent) / _KEPT
    if isinstance(value, dict):
        return {name: round_fractions(each) for name, each in value.items()}
    return [round_fractions(each) for each in value] if isinstance(value, list | tuple) else value


def open_to_write(path: Path) -> sqlite3.Connection:
    """A recording to go on with, or a new one. Raises RecordingUnusable."""
    with recording_errors(path):
        make_private_file(path)
        there = path.stat().st_size > 0
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if there:
            _harden(database, path)
            if is_cut_off(path, database):
                raise RecordingUnusable(f"{path} is truncated: the end of the recording is missing", path=str(path))
            _check(path, database)
            database.execute("PRAGMA writable_schema=OFF")
            database.set_progress_handler(None, 0)
        else:
            database.executescript(
                f"PRAGMA page_size={_PAGE_BYTES}; PRAGMA application_id={APPLICATION_ID};"
                f"PRAGMA user_version={VERSION}; BEGIN; {_SCHEMA} COMMIT;"
            )
        database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=16;")
        return database


def open_to_read(path: Path) -> sqlite3.Connection:
    """A recording, also while it is being made, or what is left of one. Raises RecordingUnusable."""
    if not is_file(path):
        raise RecordingUnusable(f"No such file: {path}", path=str(path))
    with recording_errors(path):
        where = path.absolute().as_uri()
        database = sqlite3.connect(f"{where}?mode=ro", uri=True)
        try:
            _harden(database, path)
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:  # the folder is not ours to write
            database.close()
            database = sqlite3.connect(f"{where}?immutable=1", uri=True)
            _harden(database, path)
        _check(path, database)
        return database


def is_cut_off(path: Path, database: sqlite3.Connection) -> bool:
    """Return whether the file is shorter than it says."""
    pages, page_bytes = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return not path.with_name(f"{path.name}-wal").exists() and path.stat().st_size < int(pages * page_bytes)


def _harden(database: sqlite3.Connection, path: Path) -> None:
    """Have SQLite take nothing from the file but its rows, and read those before the place where it is cut off."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BLOB_BYTES)
    database.execute("PRAGMA trusted_schema=OFF")
    database.execute("PRAGMA cell_size_check=ON")
    database.execute("PRAGMA writable_schema=ON")  # or a file that is cut off is refused as a whole
    limit_steps(database, path.stat().st_size)


def limit_steps(database: sqlite3.Connection, num_bytes: int) -> None:
    """Have the next query fail that takes more steps than a file of `num_bytes` has rows for."""
    left = (_MIN_STEPS + _STEPS_PER_BYTE * num_bytes) // _LOOK_STEPS

    def look() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    database.set_progress_handler(look, _LOOK_STEPS)


def _check(path: Path, database: sqlite3.Connection) -> None:
    identity, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if identity != APPLICATION_ID:
        raise RecordingUnusable(f"{path} is not a recording of ericllm", path=str(path))
    if version > VERSION:
        raise RecordingUnusable(f"{path} was recorded by a newer ericllm", path=str(path))
    with sqlite3.connect(":memory:") as empty:
        empty.executescript(_SCHEMA)
        expected = _schema_of(empty)
    empty.close()
    if _schema_of(database) != expected:  # a view or a trigger would be a program of the author of the file
        raise RecordingUnusable(f"{path} is not a recording of ericllm: it has other tables", path=str(path))


def _schema_of(database: sqlite3.Connection) -> list[tuple[object, ...]]:
    """Tables, indexes and all else that there is, or enough of it to see that it is not ours."""
    columns = (f"substr({name}, 1, 1000)" for name in ("type", "name", "tbl_name", "sql"))
    query = f"SELECT {', '.join(columns)} FROM sqlite_master LIMIT 20"
    return sorted(database.execute(query).fetchall(), key=str)


@contextmanager
def recording_errors(path: Path) -> Iterator[None]:
    """Whatever SQLite and the disk say becomes one sentence."""
    try:
        yield
    except (sqlite3.Error, zlib.error, msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        if "not a database" in str(error):
            raise RecordingUnusable(f"{path} is not a recording of ericllm", path=str(path)) from None
        if isinstance(error, sqlite3.OperationalError):
            raise RecordingUnusable(f"{path} cannot be used: {quote_value(str(error))}", path=str(path)) from None
        raise RecordingUnusable(f"{path} is damaged or truncated", path=str(path)) from None
    except OSError as error:
        raise RecordingUnusable(f"{path} cannot be used: {error.strerror}", path=str(path)) from None


def close_as_one_file(database: sqlite3.Connection) -> None:
    """Close so that no other file is needed; a reader of this moment goes on needing it."""
    with suppress(sqlite3.Error):
        database.execute("PRAGMA journal_mode=DELETE")
    database.close()
