"""Recording: the frames of a file, wherever one looks. Going on to the next one is cheap, a jump reads one segment."""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.link.frames import MAX_HISTORY, Frame, PatchedValue, from_plain, limit_frame
from console.link.recording.store import (
    Packer,
    RecordingUnusable,
    is_cut_off,
    limit_steps,
    open_to_read,
    recording_errors,
)
from console.text import MAX_TIME
from engine.metrics.history import HOUR_SECONDS, tens_of
from engine.snapshot import LogEntry, Second, TenSeconds

LOG_LINES = 5000
MAX_LOG_TEXT = 2**22
"""Characters of the lines that are shown at once: pages of the file may stand for many lines each."""

MAX_FRAMES = 5 * 10**6
"""Two months of one a second. Each takes 24 bytes of memory, and as many of the file."""

MAX_SEGMENT_FRAMES = 1000
"""One is a minute, of ten frames a second."""

MAX_SEGMENT_COPIED = 3 * 10**7
"""Items that the changes of one may copy: half a second."""

_MAX_CUT_SEGMENTS = 10
"""Segments at the end of a truncated file that are tried for one that can be read."""


class Recording:
    """One file. Raises RecordingUnusable, then as later where it turns out to be damaged. Belongs to one thread.

    damage: why there is nothing after the last frame although there was, a sentence; "" where all is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self._database = open_to_read(path)
        self.times, self._ids, self._segments = array("d"), array("q"), array("q")
        self._index = self._reached = -1
        self._tree = PatchedValue(None)
        self._packer = Packer()
        with recording_errors(path):
            self._read_index()
            if is_cut_off(path, self._database):
                self._drop_unreadable()
        if not self.times:
            raise RecordingUnusable(self.damage or f"{path} has no frames yet", path=str(path))
        self._past: tuple[int, tuple[Second, ...]] = (0, ())
        self._hour: tuple[tuple[float, float], tuple[TenSeconds, ...]] = ((0.0, 0.0), ())

    @property
    def begins(self) -> float:
        """Unix time of the first frame."""
        return self.times[0]

    @property
    def ends(self) -> float:
        """Unix time of the last one."""
        return self.times[-1]

    def index_at(self, at: float) -> int:
        """The frame that was shown at a time; the first one before it all."""
        return max(0, bisect_right(self.times, at) - 1)

    def frame(self, index: int) -> Frame:
        """A frame, with its history. Its log is that of the recording."""
        with recording_errors(self.path):
            self._go_to(index)
            frame: Frame = limit_frame(from_plain(self._tree.value, Frame))
            past = self._seconds_before(self._segments[index])
            logged = self._log_until(frame.snapshot.at)
        seconds = (*past, *frame.snapshot.history)
        snapshot = msgspec.structs.replace(
            frame.snapshot, history=seconds[-MAX_HISTORY:], hour=self._hour_of(seconds), log_total=logged
        )
        return msgspec.structs.replace(frame, snapshot=snapshot)

    def lines(self, until: float, after: int) -> tuple[int, Sequence[LogEntry]]:
        """How many lines had been logged by `until`, and those after the first `after`, the newest of them."""
        with recording_errors(self.path):
            total = self._log_until(until)
            wanted = min(max(0, total - after), LOG_LINES)
            query = "SELECT at, level, source, message FROM lines WHERE at <= ? ORDER BY at DESC, id DESC LIMIT ?"
            entries, length = [], 0
            for row in self._rows(query, until, wanted):
                entry: LogEntry = from_plain(dict(zip(LogEntry.__struct_fields__, row, strict=True)), LogEntry)
                length += len(entry.message)
                if length > MAX_LOG_TEXT:
                    break
                entries.append(entry)
        return total, entries[::-1]

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _read_index(self) -> None:
        """When frames are, as far as that can be read and makes sense."""
        in_segment = 0
        for number, at, segment in self._rows("SELECT id, at, segment FROM frames ORDER BY id LIMIT ?", MAX_FRAMES + 1):
            in_segment = 0 if segment == number else in_segment + 1
            if not (
                type(number) is type(segment) is int
                and isinstance(at, float)
                and (self.times[-1] if self.times else 0.0) < at < MAX_TIME
                and (self._ids[-1] if self._ids else 0) < number
                and (segment == number or (self._segments and segment == self._segments[-1]))
                and in_segment < MAX_SEGMENT_FRAMES
                and len(self.times) < MAX_FRAMES
            ):
                self._say_damaged()
                return
            self._ids.append(number)
            self.times.append(at)
            self._segments.append(segment)

    def _drop_unreadable(self) -> None:
        """End before the frames that are listed while the pages of their data are missing."""
        self._say_damaged()
        for _ in range(_MAX_CUT_SEGMENTS):
            if not self.times:
                return
            try:
                self._go_to(len(self.times) - 1)
            except (sqlite3.Error, zlib.error, ValueError, msgspec.DecodeError):
                for column in (self._ids, self.times, self._segments):
                    del column[self._reached :]
            else:
                return

    def _rows(self, query: str, *arguments: object) -> Iterator[tuple[Any, ...]]:
        """The rows before the first that is damaged."""
        limit_steps(self._database, self.path.stat().st_size)
        try:
            yield from self._database.execute(query, arguments)
        except sqlite3.Error:
            self._say_damaged()

    def _say_damaged(self) -> None:
        self.damage = f"{self.path} is damaged or truncated; it ends there"

    def _log_until(self, until: float) -> int:
        return next((int(count) for (count,) in self._rows("SELECT count(*) FROM lines WHERE at <= ?", until)), 0)

    def _go_to(self, index: int) -> None:
        """Bring the tree to a frame: on from where it is, or from its segment's whole one."""
        first = bisect_right(self._ids, self._segments[index]) - 1
        at, self._index = self._index, -1  # whatever fails leaves nothing half done
        if not first <= at <= index:
            self._reached = first
            self._packer = Packer()
            self._tree, at = PatchedValue(self._packer.unpack(self._data(first))), first
        while at < index:
            at += 1
            self._reached = at  # counts the frames that can be read
            self._tree.patch(self._packer.unpack(self._data(at)))
            if self._tree.copied > MAX_SEGMENT_COPIED:
                raise ValueError("a segment changes too much")
        self._index = at

    def _data(self, index: int) -> object:
        limit_steps(self._database, self.path.stat().st_size)
        row = self._database.execute("SELECT data FROM frames WHERE id = ?", (self._ids[index],)).fetchone()
        return None if row is None else row[0]

    def _hour_of(self, seconds: Sequence[Second]) -> tuple[TenSeconds, ...]:
        """The tens of seconds, made once in each of them."""
        ends = (seconds[0].at, seconds[-1].at // 10) if seconds else (0.0, 0.0)
        if self._hour[0] != ends:
            self._hour = ends, tens_of(seconds[-HOUR_SECONDS:])
        return self._hour[1]

    def _seconds_before(self, segment: int) -> tuple[Second, ...]:
        """The history before a segment began, from as many segments as it takes."""
        if self._past[0] != segment:
            chunks: list[tuple[Second, ...]] = []
            earliest = float("inf")
            query = "SELECT data FROM seconds WHERE segment <= ? ORDER BY segment DESC LIMIT ?"
            for (data,) in self._rows(query, segment, MAX_HISTORY):
                chunk: tuple[Second, ...] = from_plain(Packer().unpack(data), tuple[Second, ...])
                chunks.append(tuple(second for second in chunk if second.at < earliest))
                earliest = min([earliest, *(second.at for second in chunk)])
                if sum(map(len, chunks)) >= HOUR_SECONDS:
                    break
            self._past = segment, tuple(second for chunk in reversed(chunks) for second in chunk)[-HOUR_SECONDS:]
        return self._past[1]
