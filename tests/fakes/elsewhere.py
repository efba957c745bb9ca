"""A FakeLink on an instance elsewhere, whose connection the test makes and breaks; and a recording of one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from console.link.frames import Frame
from console.link.protocol import ApiStatus
from console.link.recording.link import ReplayLink
from console.link.recording.reader import Recording
from console.link.recording.recorder import RecordingWriter
from console.link.status import LinkStatus
from engine.snapshot import Snapshot
from tests.fakes import scenes
from tests.fakes.link import LOGS, FakeLink


class FakeRemote(FakeLink):
    """stands: what standing() gives from now on."""

    def __init__(self, name: str, snapshot: Snapshot | None = None) -> None:
        super().__init__(snapshot)
        self.stands = LinkStatus(name=name, reach="live")

    def standing(self) -> LinkStatus:
        """As the test has it."""
        return self.stands

    def lose(self, reason: str, retry_in_s: float = 2.0) -> None:
        """The connection breaks off."""
        self.stands = msgspec.structs.replace(self.stands, reach="lost", reason=reason, retry_in_s=retry_in_s)

    def come_back(self) -> None:
        """It is there again."""
        self.stands = LinkStatus(name=self.stands.name, reach="live")


RECORDED_S = 300


def recording_of(snapshot: Snapshot, path: Path) -> Path:
    """Five minutes in which the queue grows by one each second. The last second is that of `snapshot`."""
    with RecordingWriter(path) as writer:
        for at in range(RECORDED_S + 1):
            moment = scenes.NOW - RECORDED_S + at
            past = tuple(second for second in snapshot.history if second.at <= moment)
            shown = msgspec.structs.replace(snapshot, at=moment, queued=at, history=past)
            lines = [line for line in LOGS if int(line.at) == int(moment)]
            writer.add(Frame(snapshot=shown, api=ApiStatus(running=True, clients=3, requests=4120)), lines)
    return path


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def replay_of(path: Path) -> tuple[ReplayLink, Clock]:
    """The recording played, by a clock of the test's own."""
    clock = Clock()
    return ReplayLink(Recording(path), clock), clock
