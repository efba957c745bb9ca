"""ReplayLink: an EngineLink on a recording. It shows what was, and takes no order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from console.called import CalledLink, MuteConversation
from console.calls import Call
from console.deltas import shaped
from console.frames import Frame
from console.link import ApiStatus
from console.recording.playhead import Playhead
from console.recording.reader import Recording
from console.recording.store import RecordingUnusable
from console.standing import Reach, Standing
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot


class OnlyRecorded(EngineError):
    """Something was asked of an engine that is not there any more."""

    code = "only_recorded"
    http_status = 409


class ReplayLink(CalledLink):
    """Shows the frame that the playhead is at. Belongs to the screens' thread."""

    def __init__(self, recording: Recording, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(self)
        self.conversation = MuteConversation(self, _refusal)
        self.recording = recording
        self.playhead = Playhead(recording.times, clock())
        self._clock = clock
        self._shown: tuple[int, Frame] = (0, recording.frame(0))
        self._problem = ""

    @property
    def now(self) -> float:
        """By the clock that the playhead goes by."""
        return self._clock()

    @property
    def position(self) -> float:
        """The unix time that is shown."""
        return self.playhead.position(self.now)

    def snapshot(self) -> Snapshot:
        """That of the frame at hand; where it cannot be read, the last one that could."""
        return self._frame().snapshot

    def api_status(self) -> ApiStatus:
        """As it was."""
        return self._frame().api

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Lines logged until the time that is shown."""
        return self.recording.lines(self.position, after)

    def standing(self) -> Standing:
        """A recording; lost is one that cannot be read here, or ends too early."""
        is_last = self._shown[0] == len(self.recording.times) - 1
        problem = self._problem or (self.recording.damage if is_last else "")
        reach: Reach = "lost" if problem else "recording"
        return Standing(name=self.recording.path.name, reach=reach, reason=problem, read_only=True)

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """What was recorded of it; the rest is not known."""
        answers = self._frame().answers
        if call.name not in answers or arguments:
            return call.blank(**arguments)
        try:
            found: object = shaped(answers[call.name], call.result)
        except msgspec.ValidationError:  # recorded by another version
            return call.blank(**arguments)
        return found

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Refused."""
        raise _refusal()

    async def start_api(self) -> None:
        """Refused."""
        raise OnlyRecorded("This is a recording: its API cannot be switched on")

    async def stop_api(self, *, finish: bool = False) -> None:
        """Refused."""
        raise OnlyRecorded("This is a recording: its API cannot be switched off")

    def _frame(self) -> Frame:
        index = self.recording.index_at(self.position)
        if index != self._shown[0]:
            try:
                self._shown = index, self.recording.frame(index)
                self._problem = ""
            except RecordingUnusable as error:
                self._shown = index, self._shown[1]  # it is not tried again each time that it is looked at
                self._problem = error.message
        return self._shown[1]


def _refusal() -> OnlyRecorded:
    return OnlyRecorded("This is a recording: it shows what was, and nothing can be asked of it or changed")
