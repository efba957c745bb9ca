"""ReplayLink: an EngineLink on a recording. It shows what was, and takes no order."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec

from console.link.frames import Frame, from_plain
from console.link.protocol import ApiStatus
from console.link.recording.reader import Recording
from console.link.recording.store import RecordingUnusable
from console.link.rpc import Call, NullConversation, RpcLink
from console.link.status import LinkStatus, Reach
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot

# Playhead: where in a recording one is, as time goes by. Pure: every call gets the time.

SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
GAP_S = 10.0
_GAP_FRAMES = 3
"""Frames: where nothing was recorded for GAP_S and for this many frames, playing skips the gap."""

_LOOKED_AT = 1000
"""Frames at the beginning, of which the usual interval is taken."""


class Playhead:
    """times: unix times of the frames, in order. It begins at the first, playing."""

    def __init__(self, times: Sequence[float], now: float) -> None:
        self._times = times
        apart = sorted(later - at for at, later in pairwise(times[:_LOOKED_AT]))
        self._gap_s = max(GAP_S, _GAP_FRAMES * apart[(len(apart) - 1) // 2]) if apart else GAP_S
        playing = map(self._playing_s, times, times[1:])
        self._played = array("d", accumulate(playing, initial=0.0))  # seconds until each frame
        self._from, self._since = times[0], now
        self.speed = 1.0
        self.paused = False

    def position(self, now: float) -> float:
        """The unix time that is shown. It stays at the end."""
        if self.paused:
            return self._from
        at, left_s = self._from, max(0.0, now - self._since) * self.speed
        later = bisect_right(self._times, at)
        if later >= len(self._times):
            return self._times[-1]
        if at + left_s < self._times[later] <= at + self._gap_s:
            return at + left_s
        played = self._played[later] + left_s - self._playing_s(at, self._times[later])
        later = bisect_right(self._played, played)
        if later >= len(self._times):
            return self._times[-1]
        return self._times[later] - (self._played[later] - played)

    def ended(self, now: float) -> bool:
        """Return whether there is nothing more to play."""
        return self.position(now) >= self._times[-1]

    def toggle(self, now: float) -> None:
        """Pause, or go on; at the end, from the beginning."""
        if not self.paused and self.ended(now):
            self.seek(self._times[0], now)
            return
        self.seek(self.position(now), now)
        self.paused = not self.paused

    def seek(self, at: float, now: float) -> None:
        """Go to a time, as far as there is one."""
        self._from, self._since = min(max(at, self._times[0]), self._times[-1]), now

    def change_speed(self, by: int, now: float) -> None:
        """The next faster speed, or slower one."""
        self.seek(self.position(now), now)
        place = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self.speed))
        self.speed = SPEEDS[min(max(place + by, 0), len(SPEEDS) - 1)]

    def _playing_s(self, at: float, later: float) -> float:
        """Seconds that playing takes between two frames."""
        return later - at if later - at <= self._gap_s else 0.0


def time_of(text: str, begins: float, ends: float, midnight: float) -> float | None:
    """The unix time that a person means by "14:02", "14:02:11", "+90" or "-90" (seconds from the start, from the end)
    or "50%"; None where it is none of these. midnight: that of the day on which the recording begins."""
    text = text.strip()
    try:
        if text.endswith("%"):
            return begins + (ends - begins) * float(text[:-1]) / 100
        if text.startswith("+"):
            return begins + float(text[1:])
        if text.startswith("-"):
            return ends - float(text[1:])
        hours, minutes, *seconds = (int(part) for part in text.split(":"))
    except ValueError:
        return None
    if len(seconds) > 1 or not (0 <= hours < 24 and 0 <= minutes < 60 and all(0 <= each < 60 for each in seconds)):
        return None
    at = midnight + hours * 3600 + minutes * 60 + sum(seconds)
    return at if at >= begins - 60 else at + 86400


class OnlyRecorded(EngineError):
    """Something was asked of an engine that is not there any more."""

    code = "only_recorded"
    http_status = 409


class ReplayLink(RpcLink):
    """Shows the frame that the playhead is at. Belongs to the screens' thread."""

    def __init__(self, recording: Recording, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(self)
        self.conversation = NullConversation(self, _refusal)
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

    def standing(self) -> LinkStatus:
        """A recording; lost is one that cannot be read here, or ends too early."""
        is_last = self._shown[0] == len(self.recording.times) - 1
        problem = self._problem or (self.recording.damage if is_last else "")
        reach: Reach = "lost" if problem else "recording"
        name = self.recording.path.name
        return LinkStatus(name=name, reach=reach, reason=problem, read_only=True, calls=frozenset())

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the recorded answer, or a blank."""
        answers = self._frame().answers
        if call.name not in answers or arguments:
            return call.blank(**arguments)
        try:
            found: object = from_plain(answers[call.name], call.result)
        except msgspec.ValidationError:  # recorded by another version
            return call.blank(**arguments)
        return found

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Refused."""
        raise _refusal()

    async def start_api(self) -> None:
        """Refused."""
        raise OnlyRecorded("This is a recording: its API cannot be switched on")

    async def stop_api(self, *, finish: bool = False) -> bool:
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
    return OnlyRecorded(LinkStatus(reach="recording").refusal)
