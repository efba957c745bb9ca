"""What a console elsewhere is sent of an engine, again and again: all of it once, then what changed. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from console.deltas import Change, PatchedValue, difference, plain, shaped
from console.link import ApiStatus
from engine.snapshot import Snapshot

MAX_HISTORY = 600
"""Seconds, as a snapshot has them."""

_MAX_ITEMS = {"devices": 256, "models": 256, "workers": 1024, "requests": 10_000}
"""Of a snapshot's lists, beyond which a screen that draws each of them stands still."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment, as its console shows it. answers: what other calls gave, by their names."""

    snapshot: Snapshot
    api: ApiStatus = ApiStatus()
    answers: dict[str, Any] = {}


class FrameEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the two: a whole frame (as `plain` has it), or what changed since the one before."""

    full: Any = None
    delta: Change | None = None


class FrameWriter:
    """Frames to events."""

    def __init__(self) -> None:
        self._last: Frame | None = None

    def event(self, frame: Frame) -> FrameEvent | None:
        """What is to be told of a frame after those before it; None for nothing."""
        last, self._last = self._last, frame
        if last is None:
            return FrameEvent(full=plain(frame))
        change = difference(last, frame)
        return None if change is None else FrameEvent(delta=change)


class FrameReader:
    """Events to frames."""

    def __init__(self) -> None:
        self._tree: PatchedValue | None = None

    def frame(self, event: FrameEvent) -> Frame:
        """The frame after an event. Raises ValueError for an event that is none, or that belongs after another."""
        if event.full is not None:
            self._tree = PatchedValue(event.full)
        elif event.delta is not None and self._tree is not None:
            self._tree.patch(event.delta)
        else:
            raise ValueError("an event holds no frame, and no change of one")
        return bounded(shaped(self._tree.value, Frame))


def bounded(frame: Frame) -> Frame:
    """Return a frame from elsewhere, with no more of its past than is shown.

    Raises ValueError for more devices, models, workers or requests than a screen can show.
    """
    snapshot = frame.snapshot
    for name, most in _MAX_ITEMS.items():
        if (count := len(getattr(snapshot, name))) > most:
            raise ValueError(f"it holds {count:,} {name}, of which {most:,} can be shown")
    if len(snapshot.history) <= MAX_HISTORY:
        return frame
    return msgspec.structs.replace(
        frame, snapshot=msgspec.structs.replace(snapshot, history=snapshot.history[-MAX_HISTORY:])
    )
