"""Recorder: what a link shows, into a file, on a thread of its own, so that a slow disk delays nothing else."""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

import msgspec

from console.link.frames import Frame, FrameWriter, to_plain
from console.link.protocol import EngineLink
from console.link.recording.store import (
    SEGMENT_BYTES,
    SEGMENT_S,
    Packer,
    RecordingUnusable,
    close_as_one_file,
    open_to_write,
    recording_errors,
)
from console.link.rpc import CALLS
from engine.errors import EngineError
from engine.models.files import home_expanded
from engine.snapshot import LogEntry, Second
from engine.system.slow_disk import writes

# RecordingWriter: frames into a file, each small, and all of them there after a crash.


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
            raise RecordingUnusable(f"{path} is in use by another recording", path=str(path)) from None
        with recording_errors(path):
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
        with recording_errors(self.path), writes.timed(self.path):
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
        self._insert(frame.snapshot.at, self._packer.pack(event.full))
        self._database.execute("INSERT INTO seconds VALUES (?, ?)", (self._segment, Packer().pack(to_plain(seconds))))

    def _go_on(self, frame: Frame) -> None:
        event = self._frames.event(self._without_past(frame))
        if event is not None:
            self._insert(frame.snapshot.at, self._packer.pack(event.delta))

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
        """With the seconds of this segment alone: the hour is made of them where it is read."""
        own: tuple[Second, ...] = tuple(each for each in frame.snapshot.history if each.at > self._second_at)
        snapshot = msgspec.structs.replace(frame.snapshot, history=own, hour=())
        return msgspec.structs.replace(frame, snapshot=snapshot)

    def _newest(self, query: str) -> float:
        found = self._database.execute(query).fetchone()[0]
        return float("-inf") if found is None else float(found)


log = logging.getLogger(__name__)

INTERVAL_S = 1.0
OFTEN = ("api.report",)
SELDOM = ("settings.rows", "settings.path", "models.defaults")
"""Calls that are recorded besides snapshots: with each frame, and once for many of them."""

_SELDOM_LOOKS = 60


def recording(link: EngineLink, path: Path | None) -> AbstractContextManager[object]:
    """Records while it is open; nothing where there is no path. Raises RecordingUnusable."""
    return nullcontext() if path is None else Recorder(link, home_expanded(path))


class Recorder:
    """Records until it is stopped. Use it with `with`; raises RecordingUnusable where the file cannot be written.

    frames: how many were looked at.  problem: why it stopped by itself, "" while it goes on.
    """

    def __init__(self, link: EngineLink, path: Path, interval_s: float = INTERVAL_S) -> None:
        self.frames = 0
        self.problem = ""
        self._link = link
        self._writer = RecordingWriter(path)
        self._interval_s = interval_s
        self._seen = 0
        self._seldom: dict[str, object] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with self._writer:
            try:
                self._look()
                while not self._stopped.wait(self._interval_s):
                    self._look()
                self._look()
            except EngineError as error:
                self.problem = error.message
                log.error("the recording ended: %s", error.message)

    def _look(self) -> None:
        frame = Frame(snapshot=self._link.snapshot(), api=self._link.api_status(), answers=self._ask())
        self._seen, lines = self._link.logs(self._seen)
        self._writer.add(frame, lines)
        self.frames += 1

    def _ask(self) -> dict[str, object]:
        """Return the answers of the calls. An engine elsewhere that does not know one yet is asked again."""
        for name in SELDOM:
            if self.frames % _SELDOM_LOOKS == 0 or not self._seldom.get(name):
                self._seldom[name] = CALLS[name].on(self._link)()
        return {**self._seldom, **{name: CALLS[name].on(self._link)() for name in OFTEN}}
