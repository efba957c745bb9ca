"""Plain values from elsewhere, an instance or a recording: decoded within bounds of memory, and counted. Pure.

Every bound is on what the bytes would become: an empty list takes 3 bytes of JSON, one of msgpack, and 64 of memory.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isnan
from typing import Any

import msgspec

MAX_JSON_MARKS = 500_000
"""Commas, colons and opening brackets: a value is after each. A snapshot of 5,000 requests has half as many."""

MAX_MSGPACK_BYTES = 4 * 2**20
"""A snapshot of 5,000 requests has half as many."""

MAX_MSGPACK_CONTAINERS = 150_000
"""Bytes that may begin a list or a dict, those of text and numbers that look so among them."""

MAX_VALUES = 300_000
"""In one value, lists and dicts with all that they hold: more than a snapshot of 10,000 requests has."""

MAX_ITEMS = 20_000
"""In one list: a screen that shows it draws some of them, and looks at all."""

MAX_TEXT = 2**18
"""Characters of one text: both ends of a long prompt, say, of 2,000 tokens."""

MAX_NUMBER = 2**64
"""Integers of 64 bits; and what two fractions make of each other is no more than a float holds."""

_FEW = 64
"""Items that are looked at one by one sooner than all together."""

_BEFORE_VALUES = (b",", b":", b"[", b"{")
_CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])


def decode_json(data: bytes) -> Any:
    """Decode JSON; raises ValueError for what is none, or too much."""
    if sum(map(data.count, _BEFORE_VALUES)) > MAX_JSON_MARKS:
        raise ValueError(f"it holds more than {MAX_JSON_MARKS:,} values")
    return _decode_and_count(msgspec.json.decode, data)[0]


def decode_msgpack(data: bytes) -> tuple[Any, int]:
    """Decode msgpack, and return how many values it is; raises ValueError for what is none, or too much."""
    if len(data) > MAX_MSGPACK_BYTES or len(data) - len(data.translate(None, _CONTAINERS)) > MAX_MSGPACK_CONTAINERS:
        raise ValueError("it holds more containers than the limit")
    return _decode_and_count(msgspec.msgpack.decode, data)


def num_values(value: Any, max_text: int = MAX_TEXT) -> int:
    """Return how many values `value` is made of, those that it holds in several places counted in each.

    Raises ValueError for more than MAX_VALUES, a list of more than MAX_ITEMS, a text of more than `max_text`
    characters, a number beyond MAX_NUMBER, and one that is none.
    """
    count = 1
    waiting: list[Collection[Any]] = [(value,)]
    while waiting:
        items = waiting.pop()
        if len(items) > _FEW and _are_numbers_in_range(items):
            continue
        for each in items:
            kind = type(each)
            if kind is int or kind is float:
                if not -MAX_NUMBER <= each <= MAX_NUMBER:  # NaN is not
                    raise ValueError("it holds a number out of range")
            elif kind is str:
                if len(each) > max_text:
                    raise ValueError(f"it holds a text of {len(each):,} characters")
            elif kind is dict or kind is list or kind is tuple:
                count += len(each)
                if count > MAX_VALUES:
                    raise ValueError(f"it holds more than {MAX_VALUES:,} values")
                if kind is not dict and len(each) > MAX_ITEMS:
                    raise ValueError(f"it holds a list of {len(each):,} items")
                waiting.append(each.values() if kind is dict else each)
    return count


def _are_numbers_in_range(items: Collection[Any]) -> bool:
    """A NaN goes unseen between others where they are compared, and makes one of their sum."""
    try:
        total = sum(items)
    except (TypeError, OverflowError):
        return False
    return min(items) >= -MAX_NUMBER and max(items) <= MAX_NUMBER and not isnan(total)


def _decode_and_count(decode: Any, data: bytes) -> tuple[Any, int]:
    try:
        value = decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, num_values(value)
