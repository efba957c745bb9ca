"""BenchHistory: every result of a bench on this machine, in one SQLite file, so that tomorrow's can be compared."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from console.bench.result import BenchResult, decode_result, encode_result
from engine.errors import EngineError, InvalidRequest
from engine.system.files import make_private_file, make_private_folder

FILE = "benches.sqlite"
VERSION = 1
_LOCK_TIMEOUT_S = 5.0
_MOST = 2**63 - 1
"""What SQLite takes for a number."""
_TABLE = """
CREATE TABLE IF NOT EXISTS result (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    started TEXT NOT NULL,
    duration_s REAL NOT NULL,
    model TEXT NOT NULL,
    target TEXT NOT NULL,
    complete INTEGER NOT NULL,
    content BLOB NOT NULL
)"""


class BenchHistoryError(EngineError):
    """The history of benches cannot be read or written."""

    code = "bench_history"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the history: a result without its numbers. started: ISO 8601, UTC.  target: "engine", or a URL."""

    id: int
    name: str
    started: str
    duration_s: float
    model: str
    target: str
    complete: bool


class BenchHistory:
    """The results in a folder's file, which is made when the first is added; several programs may share it.

    Every call opens the file, so an object of this may be used from any thread. Raises BenchHistoryError where the file
    cannot be read or written, or is of a newer version.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def add(self, result: BenchResult) -> int:
        """Keep a result; returns its number."""
        target = result.target.url or result.target.kind
        with self._opened("written") as db:
            cursor = db.execute(
                "INSERT INTO result (name, started, duration_s, model, target, complete, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(result.name, result.started, result.duration_s, result.target.model, target, result.complete),
                    zlib.compress(encode_result(result)),
                ),
            )
        return cursor.lastrowid or 0

    def results(self, name: str = "", model: str = "", limit: int = 0) -> Sequence[Kept]:
        """Those of one bench and model, of all where that is "", the newest first; `limit` at most, all where 0."""
        where = " AND ".join(f"{field} = ?" for field, value in (("name", name), ("model", model)) if value)
        values = [value for value in (name, model) if value]
        names = ", ".join(Kept.__struct_fields__)
        query = f"SELECT {names} FROM result{' WHERE ' + where if where else ''} ORDER BY id DESC LIMIT ?"
        return [_from_row(row) for row in self._read(query, *values, min(limit, _MOST) or -1)]

    def result(self, number: int) -> BenchResult:
        """The result of that number. Raises InvalidRequest where there is none."""
        rows = self._read("SELECT content FROM result WHERE id = ?", number) if abs(number) <= _MOST else []
        if not rows:
            raise InvalidRequest(f"no result {number} in the history (see 'ericllm bench history')", param="id")
        return decode_result(zlib.decompress(rows[0][0]), f"result {number} of the history")

    def remove(self, number: int) -> None:
        """Forget a result. Raises InvalidRequest where there is none of that number."""
        self.result(number)
        with self._opened("written") as db:
            db.execute("DELETE FROM result WHERE id = ?", (number,))

    def _read(self, query: str, *values: object) -> list[Any]:
        if not self._file.exists():
            return []
        with self._opened("read") as db:
            return db.execute(query, values).fetchall()

    @contextmanager
    def _opened(self, what: str) -> Iterator[sqlite3.Connection]:
        """The file, inside a transaction that ends with this."""
        try:
            make_private_folder(self._file.parent)
            make_private_file(self._file)
            with closing(sqlite3.connect(self._file, timeout=_LOCK_TIMEOUT_S)) as db, db:
                if int(db.execute("PRAGMA user_version").fetchone()[0]) > VERSION:
                    raise BenchHistoryError(f"{self._file} was written by a newer version of this program")
                db.execute(_TABLE)
                db.execute(f"PRAGMA user_version = {VERSION}")
                yield db
        except (OSError, sqlite3.Error) as error:
            raise BenchHistoryError(f"the bench history {self._file} cannot be {what}: {error}") from None


def _from_row(row: tuple[Any, ...]) -> Kept:
    fields = dict(zip(Kept.__struct_fields__, row, strict=True))
    return Kept(**fields | {"complete": bool(fields["complete"])})
