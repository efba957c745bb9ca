"""Values and changes of somebody who means harm: refused in a sentence, before they cost time or memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from console.link.bounded_decode import MAX_ITEMS, MAX_VALUES, decode_json, decode_msgpack, num_values
from console.link.frames import (
    MAX_HISTORY,
    MAX_TEXT,
    Frame,
    FrameEvent,
    FrameReader,
    PatchedValue,
    from_plain,
    to_plain,
)
from engine.snapshot import DeviceReading, ModelReading, ModelStatus, RequestRow, Second, Snapshot, WorkerReading
from tests.fakes import scenes
from tests.fakes.bounds import outcome

MIB = 2**20


def refused(read: Any, num_bytes: int = 0) -> str:
    """The sentence of what is refused, within bounds."""
    said = outcome(read, num_bytes, ValueError)
    assert isinstance(said, str), f"it was taken: {type(said)}"
    return said


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"[" + b"[]," * (5 * MIB) + b"[]]",
        lambda: b"[" + b"{}," * (5 * MIB) + b"{}]",
        lambda: b"[" + b'{"a":1},' * (2 * MIB) + b"{}]",
        lambda: b"{" + b",".join(b'"%d":1' % number for number in range(10**6)) + b"}",
        lambda: b"[" + b"1," * (8 * MIB) + b"1]",
        lambda: b"[" * 10**6,
        lambda: b'{"a":' * 10**6,
        lambda: b"1" * 5000,
        lambda: b"1" * 400,
        lambda: b"[1e400]",
        lambda: b"[NaN]",
        lambda: b'"\xff"',
        lambda: b'{"a":1',
        lambda: b'"' + b"x" * (17 * MIB) + b'"',
        lambda: b"",
    ],
)
def test_json_that_is_too_much_or_none_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    assert refused(lambda: decode_json(data), len(data))


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"\xdd\x00\x40\x00\x00" + b"\x90" * (4 * MIB),
        lambda: b"\xdd\x00\x20\x00\x00" + b"\x81\xa0\xc0" * (2 * MIB),
        lambda: b"\xdd\x00\x3f\xff\x00" + b"\xc0" * 0x3FFF00,
        lambda: b"\xdd\xff\xff\xff\xff",
        lambda: b"\xdf\xff\xff\xff\xff",
        lambda: b"\xdb\xff\xff\xff\xff",
        lambda: b"\x91" * MIB,
        lambda: b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        lambda: b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
        lambda: b"\xa1\xff",
        lambda: b"",
    ],
)
def test_msgpack_that_is_too_much_or_none_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    assert refused(lambda: decode_msgpack(data), len(data))


def test_a_snapshot_of_thousands_of_requests_is_not_too_much() -> None:
    busy = scenes.busy()
    rows = tuple(msgspec.structs.replace(busy.requests[0], id=f"chatcmpl-{number:032x}") for number in range(5000))
    snapshot = msgspec.structs.replace(busy, requests=rows, history=scenes.history(600, devices=8))
    event = decode_json(msgspec.json.encode(FrameEvent(full=to_plain(Frame(snapshot=snapshot)))))
    assert FrameReader().frame(from_plain(event, FrameEvent)).snapshot == snapshot
    packed = msgspec.msgpack.encode(to_plain(Frame(snapshot=snapshot)))
    assert from_plain(decode_msgpack(packed)[0], Frame).snapshot == snapshot


def grown(value: Any, change: Any, times: int) -> Any:
    tree = PatchedValue(value)
    for _ in range(times):
        tree.patch(change(tree.value))
    return from_plain(tree.value, Any)


def test_changes_of_a_few_bytes_do_not_double_a_list_for_ever() -> None:
    def doubled(value: Any) -> Any:
        count = len(value["history"])
        return {"history": [0, [[0, count], [0, count]]]}

    assert "list of" in refused(lambda: grown({"history": [{"at": 1.0}]}, doubled, 24))


def test_lists_in_lists_do_not_multiply_each_other() -> None:
    """Each level repeats its first item, so that 12 lists of 100 items are 100^12 values."""

    def nested(depth: int) -> Any:
        return [nested(depth - 1), *range(99)] if depth else 0

    def repeat(depth: int) -> Any:
        change: Any = [0, [[0, 1]] * 100]
        for _ in range(depth):
            change = [0, [[0, change], [1, 99]]]
        return change

    def run() -> None:
        tree = PatchedValue(nested(12))
        for depth in reversed(range(12)):
            tree.patch(repeat(depth))
        from_plain(tree.value, Any)

    assert "values" in refused(run)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([{"a": 1, "b": list(range(10_000))}], [0, [[0, 1]] * 100_000]),
        ([{str(name): 1 for name in range(100_000)}], [0, [[0, {"0": [2]}]] * 10_000]),
        ([list(range(20_000))], [0, [[0, [0, [[0, 20_000]]]]] * 10_000]),
        ([[]], [0, [[0, 1]] * 400_000]),
        ({}, {str(name): [0] for name in range(600_000)}),
    ],
)
def test_one_change_costs_no_more_than_it_may(value: Any, change: Any) -> None:
    tree = PatchedValue(value)
    assert refused(lambda: tree.patch(change))
    assert tree.value is value


def test_many_changes_do_not_make_a_value_grow_for_ever() -> None:
    def more(value: Any) -> Any:
        return {f"{len(value)}": [[0] * 19_000]}

    assert f"more than {MAX_VALUES:,} values" in refused(lambda: grown({}, more, 100))


def test_what_went_makes_room_for_what_comes() -> None:
    tree = PatchedValue({"a": []})
    for number in range(200):
        tree.patch({"a": [[number] * 10_000]})
    assert tree.value == {"a": [199] * 10_000}


def test_items_may_change_places_and_repeat() -> None:
    tree = PatchedValue([1, 2, 3])
    tree.patch([0, [[2, 1], [0, 2], [0, 1], [1, [5]]]])
    assert tree.value == [3, 1, 2, 1, 5]


def test_a_whole_value_may_take_the_place_of_another() -> None:
    tree = PatchedValue({"a": 1})
    tree.patch([{"b": 2}])
    assert tree.value == {"b": 2}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "change",
    [
        deep(100_000),
        {"a": deep(100_000)},
        {"a": [deep(50)], "history": [0, [[-1, 1]]]},
        [0, [[0, -1]]],
        [0, [[0, 10**9]]],
        [0, [[10**30, 1]]],
        [0, [["a", 1]]],
        [0, [[0, "x"]]],
        [0, [[]]],
        [0, 5],
        [0],
        [],
        {"a": 5},
        {"a": []},
        {"gone": None},
        {"a": ["x" * (MAX_TEXT + 1)]},
        {"a": [[0] * (MAX_ITEMS + 1)]},
    ],
)
def test_a_change_that_is_none_is_refused_and_changes_nothing(change: Any) -> None:
    value = {"a": {"b": 1}, "history": [1]}
    tree = PatchedValue(value)
    if change == [0]:
        tree.patch(change)  # the value is 0 now
        assert tree.value == 0
        return
    assert refused(lambda: tree.patch(change))
    assert tree.value is value


@pytest.mark.parametrize(
    ("name", "item", "count"),
    [
        ("devices", DeviceReading(id="a", name="a", kind="cpu", utilisation=None, total_bytes=1), 257),
        ("models", ModelReading(key="a", name="a", status=ModelStatus()), 257),
        ("workers", WorkerReading(id="a", state="ready"), 1025),
        ("requests", RequestRow(id="a", source="api", state="queued"), 10_001),
    ],
)
def test_more_than_a_screen_can_show_is_refused(name: str, item: msgspec.Struct, count: int) -> None:
    frame = to_plain(Frame(snapshot=Snapshot(at=1.0)))
    frame["snapshot"][name] = [to_plain(item)] * count
    assert f"it holds {count:,} {name}" in refused(lambda: FrameReader().frame(FrameEvent(full=frame)))


def test_of_a_longer_history_the_last_ten_minutes_are_shown() -> None:
    history = tuple(Second(at=float(at)) for at in range(MAX_HISTORY + 5))
    event = decode_json(
        msgspec.json.encode(FrameEvent(full=to_plain(Frame(snapshot=Snapshot(at=1.0, history=history)))))
    )
    assert FrameReader().frame(from_plain(event, FrameEvent)).snapshot.history == history[5:]


@pytest.mark.parametrize("path", [5, None, ["a"], {"a": 1}])
def test_a_path_that_is_no_text_is_of_another_type(path: Any) -> None:
    frame = to_plain(Frame(snapshot=scenes.busy()))
    frame["snapshot"]["status"]["spec"]["path"] = path
    assert refused(lambda: from_plain(frame, Frame))


def test_values_are_counted_where_they_are() -> None:
    shared = [1, 2]
    assert num_values({"a": shared, "b": shared, "c": {}}) == 8
