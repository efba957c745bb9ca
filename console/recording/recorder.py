"""Recorder: what a link shows, into a file, on a thread of its own, so that a slow disk holds nobody up."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from console.calls import CALLS
from console.frames import Frame
from console.link import EngineLink
from console.recording.writer import RecordingWriter
from engine.errors import EngineError
from engine.models.files import home_expanded

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

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has stopped by itself, `timeout_s` at most."""
        self._thread.join(timeout_s)

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
        """What the calls give. What is not known yet, of an engine elsewhere, is asked for again."""
        for name in SELDOM:
            if self.frames % _SELDOM_LOOKS == 0 or not self._seldom.get(name):
                self._seldom[name] = CALLS[name].on(self._link)()
        return {**self._seldom, **{name: CALLS[name].on(self._link)() for name in OFTEN}}
