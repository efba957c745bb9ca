"""Tables: lines are as wide as they must be whatever is in them, and follow the theme."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.tui.app import EricApp
from console.tui.screens.requests.table import RequestTable
from console.tui.widgets.table import Table, cell, side_by_side
from tests.fakes import request_scenes, tune_scenes
from tests.fakes.bounds import within_bounds
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text, until

_TEXT = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
_CELL = st.lists(st.tuples(_TEXT, st.sampled_from(["", "bold", "$muted"])), max_size=3).map(tuple)


@given(st.lists(st.tuples(_CELL, st.integers(1, 25), st.sampled_from(["left", "right"])), min_size=1, max_size=6))
def test_a_line_is_as_wide_as_its_columns_whatever_is_in_them(placed: list[tuple[Any, int, Any]]) -> None:
    line = side_by_side(placed, gap=2)
    assert cell_len(line.plain) == sum(room for _, room, _ in placed) + 2 * (len(placed) - 1)
    ends = [0, *(span.end for span in line.spans)]
    assert all(span.start >= end for span, end in zip(line.spans, ends, strict=False))


def test_what_does_not_fit_ends_with_an_ellipsis() -> None:
    line = side_by_side([((("abc", "bold"), ("defgh", "")), 6, "left"), ((("12", ""),), 4, "right")], gap=1)
    assert line.plain == "abcde…   12"


@pytest.mark.parametrize("letter", ["漢", "\u0301", "👩\u200d", "❤\ufe0f", "\x1b", "x", " "])
def test_a_row_of_long_texts_costs_what_is_seen_of_it(letter: str) -> None:
    texts = [f"a{letter * 16_000}{number}" for number in range(150)]
    with within_bounds():
        lines = [side_by_side([(cell(text), 10, "left")], 1) for text in texts]
    assert {line.cell_length for line in lines} == {10}
    assert max(len(line.plain) for line in lines) < 100


async def test_a_table_takes_the_colours_of_another_theme_at_once() -> None:
    app = EricApp(FakeLink(request_scenes.busy()), start="requests")
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: bool(app.screen.query(RequestTable)))
        await pilot.pause()
        table = app.screen.query_one(Table)
        dark = [segment.style for segment in table.render_line(2)]
        app.theme = "ericllm-light"
        await pilot.pause()
        light = [segment.style for segment in table.render_line(2)]
        assert len(dark) == len(light)
        assert all(one != other for one, other in zip(dark, light, strict=True))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("screen", ["requests", "tune"])
async def test_a_terminal_without_our_glyphs_gets_plain_ones(
    monkeypatch: pytest.MonkeyPatch, screen: str, size: tuple[int, int]
) -> None:
    monkeypatch.setenv("TERM", "linux")
    snapshot = request_scenes.busy() if screen == "requests" else tune_scenes.tuned()
    link = FakeLink(snapshot)
    link.requests.details["req-00000000"] = request_scenes.moved()
    app = EricApp(link, start=screen)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: bool(app.screen.query(Table)) and bool(app.screen.query_one(Table).rows))
        await pilot.press("enter")
        if screen == "requests":
            await until(pilot, lambda: "first token" in screen_text(app))
        await pilot.pause()
        odd = {char for char in screen_text(app) if not char.isascii()}
        assert odd == set()
