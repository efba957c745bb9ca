"""Stop strings: the same visible text however the answer is split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.output_processor import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def run(pieces: Iterable[str], stops: Sequence[str], include_stop: bool = False) -> tuple[str, bool]:
    """All visible text, and whether a stop string ended it."""
    matcher = StopMatcher(stops, include_stop)
    visible, matched = "", False
    for piece in pieces:
        text, matched = matcher.push(piece)
        visible += text
    return visible + matcher.flush(), matched


def search(text: str, stops: Sequence[str], include_stop: bool = False) -> tuple[str, bool]:
    """The same by looking at each beginning of the whole text in turn."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include_stop else end - max(map(len, found))], True
    return text, False


@given(pieces=st.lists(st.text("abc", max_size=4)), stops=STOPS, include_stop=st.booleans())
def test_any_splitting_shows_what_searching_the_whole_text_shows(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    assert run(pieces, stops, include_stop) == search("".join(pieces), stops, include_stop)


@given(text=st.text("abc"), stops=STOPS)
def test_only_an_end_that_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    visible, matched = matcher.push(text)
    held = matcher.flush()
    assert matched or (visible + held == text and (not held or any(stop.startswith(held) for stop in stops)))


@pytest.mark.parametrize(("include_stop", "visible"), [(False, "one "), (True, "one END")])
def test_a_stop_string_is_visible_only_if_asked_for(include_stop: bool, visible: str) -> None:
    assert run(["one E", "N", "D two"], ["END"], include_stop) == (visible, True)


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopMatcher(()).push("text") == ("text", False)


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(["."])
    assert [matcher.push("a.b"), matcher.push("c"), matcher.flush()] == [("a", True), ("", True), ""]
