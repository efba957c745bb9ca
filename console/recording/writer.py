"""RecordingWriter: frames into a file, each small, and all of them there after a crash."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from console.deltas import plain
from console.frames import Frame, FrameWriter
from console.recording.store import (
    SEGMENT_BYTES,
    SEGMENT_S,
    Packer,
    RecordingUnusable,
    close_as_one_file,
    open_to_write,
    told,
)
from engine.snapshot import LogEntry, Second


class RecordingWriter:
    """Goes on with a recording, or begins one; one at a time. Raises RecordingUnusable. Use it with `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = open_to_write(path)
        self._lock = path.open("rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._database.close()
            self._lock.close()
            raise RecordingUnusable(f"{path} is being recorded to by another program", path=str(path)) from None
        with told(path):
            self._at = self._newest("SELECT max(at) FROM frames")
            self._line_at = self._newest("SELECT max(at) FROM lines")
        self._segment = 0
        self._segment_began = float("-inf")
        self._second_at = float("-inf")
        self._frames = FrameWriter()
        self._packer = Packer()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_as_one_file(self._database)
        self._lock.close()

    def add(self, frame: Frame, lines: Iterable[LogEntry] = ()) -> None:
        """Keep a frame, and the log lines that came with it. One that is no later than the last is not kept."""
        at = frame.snapshot.at
        with told(self.path):
            self._database.execute("BEGIN IMMEDIATE")
            self._add_lines(lines)
            if at > self._at:
                self._at = at
                if at - self._segment_began >= SEGMENT_S or self._packer.num_bytes >= SEGMENT_BYTES:
                    self._begin(frame)
                else:
                    self._go_on(frame)
            self._database.execute("COMMIT")

    def _begin(self, frame: Frame) -> None:
        """A segment: the frame whole, and the seconds since the last segment began."""
        history = frame.snapshot.history
        seconds = [second for second in history if second.at > self._second_at]
        self._second_at = history[-1].at if history else self._second_at
        self._frames, self._packer = FrameWriter(), Packer()
        event = self._frames.event(self._without_past(frame))
        assert event is not None
        found = self._database.execute("SELECT coalesce(max(id), 0) + 1 FROM frames").fetchone()
        self._segment, self._segment_began = int(found[0]), frame.snapshot.at
        self._insert(frame.snapshot.at, self._packer.packed(event.full))
        self._database.execute("INSERT INTO seconds VALUES (?, ?)", (self._segment, Packer().packed(plain(seconds))))

    def _go_on(self, frame: Frame) -> None:
        event = self._frames.event(self._without_past(frame))
        if event is not None:
            self._insert(frame.snapshot.at, self._packer.packed(event.delta))

    def _insert(self, at: float, data: bytes) -> None:
        self._database.execute("INSERT INTO frames (at, segment, data) VALUES (?, ?, ?)", (at, self._segment, data))

    def _add_lines(self, lines: Iterable[LogEntry]) -> None:
        """Those that are not there yet."""
        new = [line for line in lines if line.at > self._line_at]
        self._line_at = max((line.at for line in new), default=self._line_at)
        self._database.executemany(
            "INSERT INTO lines (at, level, source, message) VALUES (?, ?, ?, ?)",
            [(line.at, line.level, line.source, line.message) for line in new],
        )

    def _without_past(self, frame: Frame) -> Frame:
        """With the seconds of this segment alone."""
        own: tuple[Second, ...] = tuple(each for each in frame.snapshot.history if each.at > self._second_at)
        return msgspec.structs.replace(frame, snapshot=msgspec.structs.replace(frame.snapshot, history=own))

    def _newest(self, query: str) -> float:
        found = self._database.execute(query).fetchone()[0]
        return float("-inf") if found is None else float(found)
