"""What a JSON text holds is counted before it is parsed: exactly, in time, and with the member that is too much."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.api.http import json_bounds
from console.api.http.json_bounds import MAX_ITEMS, MAX_VALUES, JsonBounds
from engine.errors import InvalidRequest
from tests.fakes.bounds import outcome

pytestmark = pytest.mark.long

MIB = 2**20
DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
HUGE = 10**9


@pytest.mark.parametrize("slice_bytes", [1, 3, 65_536])
@given(document=DOCUMENTS, is_ascii=st.booleans())
def test_depth_items_and_values_are_counted_as_a_parser_would(
    slice_bytes: int, document: object, is_ascii: bool
) -> None:
    depth, items, commas = counted(document)
    raw = json.dumps(document, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "_SLICE", slice_bytes)
        JsonBounds(max_depth=depth, max_items=items, max_values=commas + 1).check(raw)
        for beyond in (
            JsonBounds(max_depth=depth - 1, max_items=HUGE, max_values=HUGE),
            JsonBounds(max_depth=HUGE, max_items=items - 1, max_values=HUGE),
            JsonBounds(max_depth=HUGE, max_items=HUGE, max_values=commas),
        ):
            if -1 not in (beyond.max_depth, beyond.max_items) and beyond.max_values:
                with pytest.raises(InvalidRequest):
                    beyond.check(raw)


def counted(document: object) -> tuple[int, int, int]:
    """How deep lists and objects nest; how many strings, lists and objects there are; and how many commas."""
    match document:
        case str():
            return 0, 1, 0
        case list():
            within, keys = [counted(each) for each in document], 0
        case dict():
            within, keys = [counted(each) for each in document.values()], len(document)
        case _:
            return 0, 0, 0
    depth = 1 + max((deep for deep, _, _ in within), default=0)
    items = 1 + keys + sum(more for _, more, _ in within)
    return depth, items, max(0, len(within) - 1) + sum(more for _, _, more in within)


@pytest.mark.parametrize(
    ("raw", "member"),
    [
        (b'{"model":"x","tokens":[' + b"1," * 300_000 + b'1],"z":[]}', "tokens"),
        (b'{"a":[],"options":{"b":[' + b"[]," * 70_000 + b"[]]}}", "options"),
        (b'{"messages":[' + b'{"role":"user","content":"[,"},' * 20_000, "messages"),
        (b'{"a":1' + b',"b":1' * 70_000 + b"}", None),
        (b"[" + b'"",' * 70_000 + b'""]', None),
    ],
    ids=["ids", "lists", "cut short", "members", "no object"],
)
def test_the_member_that_holds_too_much_is_named(raw: bytes, member: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        JsonBounds().check(raw)
    assert refused.value.details.get("param") == member
    assert str(refused.value).startswith(f"{member or 'The body'} is too large")
    assert str(MAX_ITEMS) in str(refused.value) or str(MAX_VALUES) in str(refused.value)


UNITS = [b"[", b"[],", b'{"a":0},', b'"",', b'"[",', b'\\"', b"\\\\", b'"\\",', b",", b'"', b"1,", b"{", b"]", b"\xff"]


@pytest.mark.parametrize("unit", UNITS)
def test_whatever_the_bytes_are_counting_them_is_cheap(unit: bytes) -> None:
    for raw in (unit * (8 * MIB // len(unit)), b'{"a":"' + unit * (8 * MIB // len(unit)), b"[" + b" " * 8 * MIB):
        outcome(lambda raw=raw: JsonBounds().check(raw), 0, InvalidRequest)


def test_text_may_have_any_number_of_marks() -> None:
    text = 'a, [b], {"c"} \\ ' * 300_000
    JsonBounds().check(json.dumps({"prompt": text, "stop": [","]}).encode())
