"""Recording: the frames of a file, wherever one looks. Going on to the next one is cheap, a jump reads one segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.deltas import patched, shaped
from console.frames import Frame
from console.recording.store import Packer, RecordingUnusable, open_to_read, told
from engine.snapshot import LogEntry, Second

HISTORY_SECONDS = 600
LOG_LINES = 5000


class Recording:
    """One file. Raises RecordingUnusable, then as later where it turns out to be damaged. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = open_to_read(path)
        with told(path):
            rows = self._database.execute("SELECT id, at, segment FROM frames ORDER BY id").fetchall()
        if not rows:
            raise RecordingUnusable(f"{path} holds no frame yet", path=str(path))
        self.times = [float(at) for _, at, _ in rows]
        self._ids = [int(number) for number, _, _ in rows]
        self._segments = [int(segment) for _, _, segment in rows]
        self._index = -1
        self._tree: Any = None
        self._packer = Packer()
        self._past: tuple[int, tuple[Second, ...]] = (0, ())

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
        with told(self.path):
            self._go_to(index)
            frame: Frame = shaped(self._tree, Frame)
            past = self._seconds_before(self._segments[index])
            logged = self._logged(frame.snapshot.at)
        history = (*past, *frame.snapshot.history)[-HISTORY_SECONDS:]
        snapshot = msgspec.structs.replace(frame.snapshot, history=history, log_total=logged)
        return msgspec.structs.replace(frame, snapshot=snapshot)

    def lines(self, until: float, after: int) -> tuple[int, Sequence[LogEntry]]:
        """How many lines had been logged by `until`, and those after the first `after`, the newest of them."""
        with told(self.path):
            total = self._logged(until)
            wanted = min(max(0, total - after), LOG_LINES)
            rows = self._database.execute(
                "SELECT at, level, source, message FROM lines WHERE at <= ? ORDER BY at DESC, id DESC LIMIT ?",
                (until, wanted),
            ).fetchall()
        entries = [LogEntry(at=at, level=level, source=source, message=said) for at, level, source, said in rows]
        return total, entries[::-1]

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _logged(self, until: float) -> int:
        return int(self._database.execute("SELECT count(*) FROM lines WHERE at <= ?", (until,)).fetchone()[0])

    def _go_to(self, index: int) -> None:
        """Bring the tree to a frame: on from where it is, or from its segment's whole one."""
        first = bisect_right(self._ids, self._segments[index]) - 1
        if not first <= self._index <= index:
            self._packer = Packer()
            self._tree, self._index = self._packer.unpacked(self._data(first)), first
        while self._index < index:
            self._tree = patched(self._tree, self._packer.unpacked(self._data(self._index + 1)))
            self._index += 1

    def _data(self, index: int) -> bytes:
        row = self._database.execute("SELECT data FROM frames WHERE id = ?", (self._ids[index],)).fetchone()
        if row is None:
            raise ValueError("a frame is missing")
        return bytes(row[0])

    def _seconds_before(self, segment: int) -> tuple[Second, ...]:
        """The history before a segment began, from as many segments as it takes."""
        if self._past[0] != segment:
            chunks: list[tuple[Second, ...]] = []
            earliest = float("inf")
            query = "SELECT data FROM seconds WHERE segment <= ? ORDER BY segment DESC"
            for (data,) in self._database.execute(query, (segment,)):
                chunk: tuple[Second, ...] = shaped(Packer().unpacked(data), tuple[Second, ...])
                chunks.append(tuple(second for second in chunk if second.at < earliest))
                earliest = min([earliest, *(second.at for second in chunk)])
                if sum(map(len, chunks)) >= HISTORY_SECONDS:
                    break
            self._past = segment, tuple(second for chunk in reversed(chunks) for second in chunk)
        return self._past[1]
