"""The file: an SQLite database. What is in it is here; `writer` and `reader` say how it gets there and back.

A frame of each segment, the first, is whole; the others are what changed since the one before. A whole frame has no
history: beside it lie the seconds that came since the last one, and those of the segment are in its changes. All is
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

from engine.errors import EngineError
from engine.files import make_private_file

APPLICATION_ID = 0x45524943
VERSION = 1
SEGMENT_S = 60.0

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
    """The file is no recording, is damaged, or cannot be written; the message says which."""

    code = "recording_unusable"
    http_status = 400


class Packer:
    """One segment's values, small: each is deflated with those before it as its dictionary, for they are alike."""

    def __init__(self) -> None:
        self._seen = b""

    def packed(self, value: object) -> bytes:
        """A plain value. Numbers are kept to five digits, as no screen shows more."""
        raw = msgspec.msgpack.encode(rounded(value))
        compressor = zlib.compressobj(_LEVEL, zdict=self._seen)
        data = compressor.compress(raw) + compressor.flush()
        self._look_back(raw)
        return data

    def unpacked(self, data: bytes) -> Any:
        """What another Packer made, in the same order; raises zlib.error or msgspec.DecodeError for what is damaged."""
        decompressor = zlib.decompressobj(zdict=self._seen)
        raw = decompressor.decompress(data) + decompressor.flush()
        self._look_back(raw)
        return msgspec.msgpack.decode(raw)

    def _look_back(self, raw: bytes) -> None:
        self._seen = (self._seen + raw)[-_DICTIONARY_BYTES:]


def rounded(value: Any) -> Any:
    """Fractions to 17 significant bits (five digits), which deflate well; unix times stay whole."""
    if isinstance(value, float):
        if not 0 < abs(value) < _LARGEST_ROUNDED:
            return value
        mantissa, exponent = math.frexp(value)
        return math.ldexp(round(mantissa * _KEPT), exponent) / _KEPT
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def open_to_write(path: Path) -> sqlite3.Connection:
    """A recording to go on with, or a new one. Raises RecordingUnusable."""
    with told(path):
        make_private_file(path)
        there = path.stat().st_size > 0
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if there:
            _check(path, database)
        else:
            database.executescript(
                f"PRAGMA page_size={_PAGE_BYTES}; PRAGMA application_id={APPLICATION_ID};"
                f"PRAGMA user_version={VERSION}; BEGIN; {_SCHEMA} COMMIT;"
            )
        database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=16;")
        return database


def open_to_read(path: Path) -> sqlite3.Connection:
    """A recording, also while it is being made. Raises RecordingUnusable."""
    if not path.is_file():
        raise RecordingUnusable(f"There is no file {path}", path=str(path))
    with told(path):
        where = path.absolute().as_uri()
        database = sqlite3.connect(f"{where}?mode=ro", uri=True)
        try:
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:  # beside a file in a folder that is not ours to write
            database.close()
            database = sqlite3.connect(f"{where}?immutable=1", uri=True)
        _check(path, database)
        return database


def _check(path: Path, database: sqlite3.Connection) -> None:
    identity, version, pages, page_bytes = (
        database.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "page_count", "page_size")
    )
    if identity != APPLICATION_ID:
        raise RecordingUnusable(f"{path} is no recording of ericllm", path=str(path))
    if version > VERSION:
        raise RecordingUnusable(f"{path} was recorded by a newer ericllm", path=str(path))
    if not path.with_name(f"{path.name}-wal").exists() and path.stat().st_size < pages * page_bytes:
        raise RecordingUnusable(f"{path} is cut off: the end of the recording is missing", path=str(path))


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Whatever SQLite and the disk say becomes one sentence."""
    try:
        yield
    except (sqlite3.Error, zlib.error, msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        if "not a database" in str(error):
            raise RecordingUnusable(f"{path} is no recording of ericllm", path=str(path)) from None
        if isinstance(error, sqlite3.OperationalError):
            raise RecordingUnusable(f"{path} cannot be used: {error}", path=str(path)) from None
        raise RecordingUnusable(f"{path} is damaged or cut off", path=str(path)) from None
    except OSError as error:
        raise RecordingUnusable(f"{path} cannot be used: {error.strerror}", path=str(path)) from None


def close_as_one_file(database: sqlite3.Connection) -> None:
    """Close so that no other file is needed; where somebody reads it just now, they go on needing it."""
    with suppress(sqlite3.Error):
        database.execute("PRAGMA journal_mode=DELETE")
    database.close()
