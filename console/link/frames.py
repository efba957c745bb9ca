"""Frames of an engine for a console elsewhere: the whole once, then the changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from console.link.bounded_decode import MAX_ITEMS, MAX_VALUES, num_values
from console.link.protocol import ApiStatus
from engine.snapshot import Snapshot

# What changed from one struct to the next, as small JSON-able values; and putting it back together. Pure.
#
# A change of a value is one of
#
#     [value] it is this now
#     {field: change, ...} these fields changed; null: the field is gone
#     [0, spans] a list, put together from spans of the old one, in order:
#         [start, count] `count` items of the old list from `start` on, as they were
#         [index, change] the old item at `index`, changed
#         [value] a new item
#
# so that a history that moves on by a second costs one second, and a table one row for each row that changed.

T = TypeVar("T")
Change = list[Any] | dict[str, Any]

MAX_TEXT = 2**14
"""Characters of one text of a value that changes: names, paths and sentences."""

MAX_COPIED = 10**6
"""Items that one change may copy: several times all that a value can hold, and some 20 ms."""

_NUMBERS = frozenset({int, float, bool, type(None)})
_NAMES = ("id", "key", "at", "name", "device", "code")
"""Fields that identify the items of a list, the first that there is. A poor choice costs bytes, never truth."""


def to_plain(value: object) -> Any:
    """A struct (or what it holds) as dicts, lists, text and numbers."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_other)


def from_plain(value: object, kind: type[T] | Any, *, strict: bool = True) -> T:
    """Return the result of `to_plain` as the type that it was; raise msgspec.ValidationError where it is not that.

    strict: numbers may not come as text.
    """
    try:
        found: T = msgspec.convert(value, kind, str_keys=True, strict=strict, dec_hook=_shaped_other)
    except RecursionError:
        raise msgspec.ValidationError("it is nested too deeply") from None
    return found


def diff(old: object, new: object) -> Change | None:
    """Return the change of `old`, a struct or a part of one; None where nothing changed."""
    if old is new:
        return None
    if _is_record(old) and type(old) is type(new):
        fields: tuple[str, ...] = new.__struct_fields__  # type: ignore[attr-defined]
        return _fields({name: getattr(old, name) for name in fields}, {name: getattr(new, name) for name in fields})
    if isinstance(old, dict) and isinstance(new, dict):
        return _fields(old, new)
    if isinstance(old, tuple | list) and isinstance(new, tuple | list) and any(map(_is_record, new)):
        return _items(old, new)
    return None if type(old) is type(new) and old == new else [to_plain(new)]


class PatchedValue:
    """A value, as `plain` has it, that changes from elsewhere are applied to.

    It never holds more than twice MAX_VALUES values, those that it holds in several places counted in each: a list may
    hold an item of the old one repeatedly, so a change of 40 bytes could double it.
    copied: items copied by all changes so far, which is what they cost.
    Raises ValueError for a value that is more than that.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.copied = 0
        self._max_copied = 0
        self._max_values = num_values(value, MAX_TEXT)
        self._added = 0

    def patch(self, change: Change) -> None:
        """Apply a change; the new value shares with the old one what did not change.

        Raises ValueError for a change that is none of this value, and one that makes too much of it; the value stays as
        it was.
        """
        self._max_copied, self._added = self.copied + MAX_COPIED, 0
        try:
            value = self._patch(self.value, change)
        except RecursionError:
            raise ValueError("the change is nested too deeply") from None
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"the change does not belong to this value: {error}") from None
        self._max_values += self._added
        if self._max_values > 2 * MAX_VALUES:  # what went meanwhile is still counted
            self._max_values = num_values(value, MAX_TEXT)
        self.value = value

    def _patch(self, old: Any, change: Change) -> Any:
        if isinstance(change, dict):
            return self._patched_fields(old, change)
        return self._new(change[0]) if len(change) == 1 else self._patched_items(old, change[1])

    def _patched_fields(self, old: Any, changes: dict[str, Any]) -> dict[str, Any]:
        self._copy(len(old))
        merged = dict(old)
        for name, change in changes.items():
            if change is None:
                del merged[name]
            elif name in merged:
                merged[name] = self._patch(merged[name], change)
            else:
                merged[name] = self._new(change[0])
        return merged

    def _patched_items(self, old: Any, spans: list[Any]) -> list[Any]:
        self._copy(len(old))
        used = bytearray(len(old))  # items that the new list has already
        items: list[Any] = []
        for span in spans:
            if len(span) == 1:
                items.append(self._new(span[0]))
                continue
            is_copy = isinstance(span[1], int)
            start, stop = span[0], span[0] + (span[1] if is_copy else 1)
            if not 0 <= start <= stop <= len(old):
                raise IndexError(f"it has no items {start} to {stop}")
            self._copy(stop - start)
            if used.find(1, start, stop) >= 0:
                for item in old[start:stop]:
                    self._add(_count(item))
            used[start:stop] = b"\1" * (stop - start)
            items += old[start:stop] if is_copy else (self._patch(old[start], span[1]),)
        if len(items) > MAX_ITEMS:
            raise ValueError(f"the change makes a list of {len(items):,} items")
        return items

    def _new(self, value: Any) -> Any:
        self._add(_count(value))
        return value

    def _add(self, count: int) -> None:
        self._added += count
        if self._added > 2 * MAX_VALUES:
            raise ValueError(f"the change adds more than {MAX_VALUES:,} values")

    def _copy(self, count: int) -> None:
        self.copied += count
        if self.copied > self._max_copied:
            raise ValueError(f"the change copies more than {MAX_COPIED:,} items")


def _count(value: Any) -> int:
    """As `num_values`, at once for most of them."""
    return num_values(value, MAX_TEXT) if value and type(value) not in _NUMBERS else 1


def _fields(old: Mapping[Any, object], new: Mapping[Any, object]) -> dict[str, Any] | None:
    changed: dict[str, Any] = {str(name): None for name in old if name not in new}
    for name, value in new.items():
        change = diff(old[name], value) if name in old else [to_plain(value)]
        if change is not None:
            changed[str(name)] = change
    return changed or None


def _items(old: Sequence[object], new: Sequence[object]) -> list[Any] | None:
    named = [_name(item) for item in old]
    places = {name: index for index, name in reversed(list(enumerate(named)))}
    spans: list[list[Any]] = []
    copied = False
    for place, item in enumerate(new):
        name = _name(item)
        index = place if place < len(old) and named[place] == name else places.get(name)
        change = None if index is None else diff(old[index], item)
        if index is None or change is not None:
            spans.append([to_plain(item)] if index is None else [index, change])
            copied = False
        elif copied and spans[-1][0] + spans[-1][1] == index:
            spans[-1][1] += 1
        else:
            spans.append([index, 1])
            copied = True
    unchanged = len(old) == len(new) and (spans == [[0, len(old)]] or not spans)
    return None if unchanged else [0, spans]


def _is_record(value: object) -> bool:
    return isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like


def _name(item: Any) -> object:
    """Return the identity of an item of a list; None for one that has no such field."""
    kind: Any = type(item)
    return getattr(item, _naming_field(kind), None)


@lru_cache(maxsize=256)
def _naming_field(kind: Any) -> str:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return next((name for name in _NAMES if name in fields), "")


def _plain_other(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _shaped_other(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        if not isinstance(value, str):
            raise TypeError("a path is text")
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be sent")


MAX_HISTORY = 600
"""Seconds, as a snapshot has them, and more than it has tens of seconds."""

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
        """Return the event for a frame after those before it; None where nothing changed."""
        last, self._last = self._last, frame
        if last is None:
            return FrameEvent(full=to_plain(frame))
        change = diff(last, frame)
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
            raise ValueError("an event has no frame and no change")
        return limit_frame(from_plain(self._tree.value, Frame))


def limit_frame(frame: Frame) -> Frame:
    """Return a frame from elsewhere, with no more of its past than is shown.

    Raises ValueError for more devices, models, workers or requests than a screen can show.
    """
    snapshot = frame.snapshot
    for name, most in _MAX_ITEMS.items():
        if (count := len(getattr(snapshot, name))) > most:
            raise ValueError(f"it holds {count:,} {name}, max {most:,}")
    if len(snapshot.history) <= MAX_HISTORY and len(snapshot.hour) <= MAX_HISTORY:
        return frame
    shown = msgspec.structs.replace(
        snapshot, history=snapshot.history[-MAX_HISTORY:], hour=snapshot.hour[-MAX_HISTORY:]
    )
    return msgspec.structs.replace(frame, snapshot=shown)
