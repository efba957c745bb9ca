"""Connection: the frames of one instance as they come, for as long as it takes; what it says of itself is kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec

from console.link.api import ApiStopping
from console.link.frames import Frame, FrameEvent, FrameReader, from_plain
from console.link.remote.http import Instance, NotAllowed, OutOfReach
from console.link.rpc import CALLS, STREAMS
from console.link.status import LinkStatus
from engine.config import quote_value
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot
from engine.system.log import LogRing

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 15.0
_SILENT_S = 3.0
_LATE_FRAMES = 3
"""Without a frame for _SILENT_S and for the time of this many frames, the screen says that its numbers are old. An idle
engine has a new one each second."""
_SILENT_FRAMES = 8
_SHORTEST_SILENCE_S = 8.0
"""A connection that brings no frame for so long is taken for dead."""

_MAX_RATE = 4.0
"""Times as many frames as were asked for: more come after a pause, and of who floods they wait in its socket."""

_Lines = tuple[Annotated[int, msgspec.Meta(ge=0)], tuple[LogEntry, ...]]


class _Allowed(msgspec.Struct, frozen=True):
    calls: frozenset[str]


class Connection:
    """`follow` runs on one loop; all else is safe from any thread."""

    def __init__(
        self,
        name: str,
        hz: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.frame = Frame(snapshot=Snapshot(at=time.time()))
        self.log = LogRing()
        self._hz = hz
        self._clock = clock
        self._pause = pause
        self._standing = LinkStatus(name=name, reach="connecting")
        self._retry_at: float | None = None
        self._frame_at: float | None = None
        self._seen = 0
        self._api_stops = False

    def standing(self) -> LinkStatus:
        """How it is now."""
        standing, retry_at, now = self._standing, self._retry_at, self._clock()
        silent_s = 0.0 if self._frame_at is None else now - self._frame_at
        if retry_at is not None:
            return msgspec.structs.replace(standing, retry_in_s=max(0.0, retry_at - now), silent_s=int(silent_s))
        is_silent = standing.reach == "live" and silent_s >= max(_SILENT_S, _LATE_FRAMES / self._hz)
        return msgspec.structs.replace(standing, silent_s=int(silent_s)) if is_silent else standing

    def check(self, call: str = "", *, changes: bool = False) -> None:
        """Raise the reason why a call, or anything at all, cannot be made now. changes: as `LinkStatus.refusal_of` has
        it."""
        standing = self.standing()
        if standing.reach == "connecting":
            raise OutOfReach(f"{standing.name} has not answered yet")
        if standing.reach == "refused":
            raise NotAllowed(standing.reason)
        if standing.reach == "lost":
            raise OutOfReach(f"The connection to {standing.name} is lost; reconnecting")
        if standing.silent_s:  # it would be done when the instance goes on, whenever that is
            raise OutOfReach(f"No data from {standing.name} for {standing.silent_s} s: nothing was sent to it")
        if call and (refusal := standing.refusal_of(call, changes=changes)):
            raise NotAllowed(refusal)

    async def follow(self, instance: Instance) -> None:
        """Watch until cancelled; what breaks off is begun again, later each time."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                async for _ in self._frames(instance):
                    retry_s = FIRST_RETRY_S
                reason: EngineError = OutOfReach(f"{self._standing.name} ended the connection")
            except EngineError as error:
                reason = error
            except Exception:  # a defect must not end the one task that reconnects
                log.exception("following %s failed", self._standing.name)
                reason = OutOfReach(f"Data from {self._standing.name} cannot be read; see the log")
            self._lost(reason, retry_s)
            await self._pause(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _frames(self, instance: Instance) -> AsyncIterator[Frame]:
        """One connection's frames, each kept before it is handed out."""
        await self._ask_what_is_allowed(instance)
        reader = FrameReader()
        silence_s = max(_SHORTEST_SILENCE_S, _SILENT_FRAMES / self._hz)
        query = {"hz": f"{self._hz:g}"}
        due = 0.0
        async for event in instance.events("/admin/events", query=query, silence_s=silence_s):
            if (early_s := due - self._clock()) > 0:
                await self._pause(early_s)
            due = self._clock() + 1 / (_MAX_RATE * self._hz)
            try:
                frame = reader.frame(from_plain(event, FrameEvent))
            except ValueError as error:  # msgspec's errors are ValueErrors
                raise self._not_understood(error) from None
            await self._read_log(instance, frame.snapshot.log_total)
            snapshot = msgspec.structs.replace(frame.snapshot, log_total=self.log.total)
            self.receive(msgspec.structs.replace(frame, snapshot=snapshot))
            yield self.frame

    async def _ask_what_is_allowed(self, instance: Instance) -> None:
        """Learn what this console's key may do there. An older version does not say: its own refusals do then."""
        calls: frozenset[str] | None = None
        try:
            allowed: _Allowed = from_plain(await instance.get("/admin/hello"), _Allowed)
            calls = None if allowed.calls >= CALLS.keys() | STREAMS else allowed.calls
        except (EngineError, ValueError) as error:
            log.debug("%s: cannot read the permissions of the key: %s", self._standing.name, error)
        read_only = calls is not None and not any(name in CALLS and CALLS[name].changes for name in calls)
        self._standing = msgspec.structs.replace(self._standing, read_only=read_only, calls=calls)

    def receive(self, frame: Frame) -> None:
        """Take a frame: the connection is live."""
        self.frame = frame
        self._standing = msgspec.structs.replace(self._standing, reach="live", reason="")
        self._retry_at, self._frame_at = None, self._clock()
        self._api_stops = frame.api.stopping

    async def _read_log(self, instance: Instance, total: int) -> None:
        """Fetch the lines that are new. An instance that was started again counts from 0."""
        if total < self._seen:
            self._seen = 0
        if total == self._seen:
            return
        answer = await instance.get("/admin/call/engine.logs", {"after": str(self._seen)})
        try:
            lines: _Lines = from_plain(answer["result"], _Lines)
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_understood(error) from None
        self._seen, entries = lines
        for entry in entries:
            self.log.add(entry)

    def _not_understood(self, error: Exception) -> OutOfReach:
        log.warning("%s sent an unreadable message: %s", self._standing.name, quote_value(str(error), 200))
        return OutOfReach(f"{self._standing.name} has a different version than this console")

    def _lost(self, reason: EngineError, retry_s: float) -> None:
        reach = "refused" if isinstance(reason, NotAllowed) else "lost"
        stops = isinstance(reason, ApiStopping)
        was_off = self._api_stops and isinstance(reason, OutOfReach)
        why = "the API there is switched off" if stops or was_off else reason.message
        self._api_stops = stops or was_off
        self._standing = msgspec.structs.replace(self._standing, reach=reach, reason=why)
        self._retry_at = self._clock() + retry_s
