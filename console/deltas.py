"""What changed from one struct to the next, as small JSON-able values; and putting it back together. Pure.

A change of a value is one of

    [value]                  it is this now
    {field: change, ...}     these fields changed; null: the field is gone
    [0, spans]               a list, put together from spans of the old one, in order:
        [start, count]       `count` items of the old list from `start` on, as they were
        [index, change]      the old item at `index`, changed
        [value]              a new item

so that a history that moves on by a second costs one second, and a table one row for each row that changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Change = list[Any] | dict[str, Any]

_NAMES = ("id", "key", "at", "name", "device", "code")
"""Fields that tell the items of a list apart, the first that there is. A poor choice costs bytes, never truth."""


def plain(value: object) -> Any:
    """A struct (or what it holds) as dicts, lists, text and numbers."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_other)


def shaped(value: object, kind: type[T] | Any, *, strict: bool = True) -> T:
    """What `plain` made, as the type that it was; raises msgspec.ValidationError where it is not that.

    strict: numbers may not come as text.
    """
    found: T = msgspec.convert(value, kind, str_keys=True, strict=strict, dec_hook=_shaped_other)
    return found


def difference(old: object, new: object) -> Change | None:
    """What became of `old`, a struct or what a struct holds; None where nothing did."""
    if old is new:
        return None
    if _is_record(old) and type(old) is type(new):
        fields: tuple[str, ...] = new.__struct_fields__  # type: ignore[attr-defined]
        return _fields({name: getattr(old, name) for name in fields}, {name: getattr(new, name) for name in fields})
    if isinstance(old, dict) and isinstance(new, dict):
        return _fields(old, new)
    if isinstance(old, tuple | list) and isinstance(new, tuple | list) and any(map(_is_record, new)):
        return _items(old, new)
    return None if type(old) is type(new) and old == new else [plain(new)]


def patched(old: Any, change: Change) -> Any:
    """`old`, as `plain` has it, after the change; shares with it what did not change. Raises ValueError for a change
    that is none of this value."""
    try:
        return _patched(old, change)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"the change does not belong to this value: {error}") from None


def _fields(old: Mapping[Any, object], new: Mapping[Any, object]) -> dict[str, Any] | None:
    changed: dict[str, Any] = {str(name): None for name in old if name not in new}
    for name, value in new.items():
        change = difference(old[name], value) if name in old else [plain(value)]
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
        change = None if index is None else difference(old[index], item)
        if index is None or change is not None:
            spans.append([plain(item)] if index is None else [index, change])
            copied = False
        elif copied and spans[-1][0] + spans[-1][1] == index:
            spans[-1][1] += 1
        else:
            spans.append([index, 1])
            copied = True
    unchanged = len(old) == len(new) and (spans == [[0, len(old)]] or not spans)
    return None if unchanged else [0, spans]


def _patched(old: Any, change: Change) -> Any:
    if isinstance(change, dict):
        merged = dict(old)
        for name, inner in change.items():
            if inner is None:
                del merged[name]
            elif name in merged:
                merged[name] = _patched(merged[name], inner)
            else:
                merged[name] = inner[0]
        return merged
    if len(change) == 1:
        return change[0]
    items: list[Any] = []
    for span in change[1]:
        if len(span) == 1:
            items.append(span[0])
        elif isinstance(span[1], int):
            items += old[span[0] : span[0] + span[1]]
        else:
            items.append(_patched(old[span[0]], span[1]))
    return items


def _is_record(value: object) -> bool:
    return isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like


def _name(item: Any) -> object:
    """What tells an item from others; None for all that have no such field."""
    kind: Any = type(item)
    return getattr(item, _naming_field(kind), None)


@lru_cache(maxsize=256)
def _naming_field(kind: Any) -> str:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return next((name for name in _NAMES if name in fields), "")


def _plain_other(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is nothing that travels")


def _shaped_other(kind: type, value: object) -> object:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} is nothing that travels")
