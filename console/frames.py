"""What a console elsewhere is sent of an engine, again and again: all of it once, then what changed. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from console.deltas import Change, difference, patched, plain, shaped
from console.link import ApiStatus
from engine.snapshot import Snapshot


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
        self._tree: Any = None

    def frame(self, event: FrameEvent) -> Frame:
        """The frame after an event. Raises ValueError for an event that is none, or that belongs after another."""
        if event.full is not None:
            self._tree = event.full
        elif event.delta is not None and self._tree is not None:
            self._tree = patched(self._tree, event.delta)
        else:
            raise ValueError("an event holds no frame, and no change of one")
        return shaped(self._tree, Frame)
