"""The Logs screen follows, holds still, filters, copies and exports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from console.tui.app import EricApp
from console.tui.screens.dialogs import LineScreen
from console.tui.screens.logs.screen import LogSources, LogsScreen
from console.tui.screens.logs.view import LogView
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text, shows, until

SOURCES = ("engine", "w0", "w1", "api", "console.runtime.runtime")
LEVELS = (logging.DEBUG, logging.INFO, logging.INFO, logging.WARNING, logging.ERROR)
MESSAGES = (
    "placement: 9.4 GiB of weights and 6.1 GiB of KV pages on cuda:0",
    "step 120 took 14 ms [not markup]",
    "the prefix cache holds 312 pages; 62% of the prompt tokens of the last minute were found in it already",
    "POST /v1/chat/completions 429 in 0.002 s",
    "the model took 31.2 s to load: weights 24.1 s, kernels 5.2 s, warm-up 1.9 s",
)


def logged(count: int) -> FakeLink:
    """A link that has logged that many lines more."""
    link = FakeLink(scenes.busy())
    more(link, count)
    return link


def more(link: FakeLink, count: int) -> None:
    """Log more lines; the snapshot tells so."""
    for at in range(count):
        link.log(f"{MESSAGES[at % 5]} ({at})", level=LEVELS[at % 5], source=SOURCES[at % 5])
    link.show(msgspec.structs.replace(link.snapshot(), log_total=len(link.lines)))


def view_of(pilot: Pilot[None]) -> LogView:
    """The lines."""
    return pilot.app.screen.query_one(LogView)


def shown(pilot: Pilot[None]) -> list[str]:
    """What passes the filter."""
    return [line.message for line in view_of(pilot).lines.shown]


def bottom_row(pilot: Pilot[None]) -> str:
    """The row above the keys."""
    return screen_text(pilot.app).splitlines()[-2]


def lines_seen(pilot: Pilot[None]) -> list[str]:
    """The rows of the log, without the scroll bar."""
    return [row[:-3] for row in screen_text(pilot.app).splitlines()[3:20]]


async def begun(pilot: Pilot[None]) -> None:
    """Once lines are there and it is at their end."""
    await until(pilot, lambda: bool(pilot.app.screen.query(LogView)))
    view = view_of(pilot)
    await until(pilot, lambda: len(view.lines) > 0 and view.scroll_y == view.max_scroll_y)


async def test_new_lines_are_followed() -> None:
    link = logged(3)
    async with EricApp(link, start="logs").run_test() as pilot:
        await begun(pilot)
        assert "port 8000 is taken" in screen_text(pilot.app)
        more(link, 60)
        await until(pilot, lambda: "(59)" in screen_text(pilot.app))
        assert "● following" in bottom_row(pilot)
        assert "[not markup]" in screen_text(pilot.app)


async def test_scrolled_up_it_holds_still_says_so_and_f_follows_again() -> None:
    link = logged(100)
    async with EricApp(link, start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.press("pageup")
        before = lines_seen(pilot)
        assert "■ paused, f follows" in bottom_row(pilot)
        more(link, 7)
        await until(pilot, lambda: "■ paused, 7 new, f follows" in bottom_row(pilot))
        assert lines_seen(pilot) == before
        await pilot.press("f")
        await until(pilot, lambda: "● following" in bottom_row(pilot) and "(6)" in screen_text(pilot.app))


async def test_scrolling_down_to_the_end_follows_again() -> None:
    async with EricApp(logged(100), start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.press("pageup")
        assert not view_of(pilot).follows
        await pilot.press("pagedown")
        await until(pilot, lambda: view_of(pilot).follows)


async def test_it_holds_still_also_while_the_oldest_lines_are_dropped() -> None:
    link = logged(5100)
    async with EricApp(link, start="logs").run_test() as pilot:
        await begun(pilot)
        assert len(view_of(pilot).lines) == 5000
        for _ in range(20):
            await pilot.press("pageup")
        before = lines_seen(pilot)
        more(link, 300)
        await until(pilot, lambda: view_of(pilot).unseen == 300)
        assert lines_seen(pilot) == before


async def test_the_word_filters_as_it_is_typed_and_escape_shows_all_again() -> None:
    async with EricApp(logged(0), start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.press("slash", *"kernels")
        await until(pilot, lambda: shown(pilot) == ["[kernels] compiled in 1.2 s"])
        assert "1 of 3 lines" in bottom_row(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: len(shown(pilot)) == 3)
        assert pilot.app.screen.query_one("#word", Input).value == ""


async def test_the_level_can_be_raised_and_comes_round() -> None:
    async with EricApp(logged(0), start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.press("v")  # no line is below info, so that level would leave nothing out
        assert "2 of 3 lines  hidden: info 1" in bottom_row(pilot)
        assert len(shown(pilot)) == 2
        await pilot.press("v", "v")
        assert len(shown(pilot)) == 3


async def test_one_source_alone_is_shown_and_all_have_their_counts() -> None:
    async with EricApp(logged(100), start="logs").run_test(size=(120, 40)) as pilot:
        await begun(pilot)
        rows = [tuple("".join(piece[0] for piece in cell) for cell in row.cells) for row in _sources(pilot).table.rows]
        assert rows == [
            ("▸ all", "103"),
            ("  api", "21"),
            ("  console", "20"),
            ("  engine", "21"),
            ("  w0", "21"),
            ("  w1", "20"),
        ]
        await pilot.press("s", "down", "down", "down", "down", "down", "enter")
        assert {line.source for line in view_of(pilot).lines.shown} == {"w0"}
        assert "21 of 103 lines, w0" in bottom_row(pilot)
        assert view_of(pilot).has_focus
        await pilot.press("escape")
        assert len(shown(pilot)) == 103


async def test_where_it_is_narrow_the_sources_come_when_asked_for() -> None:
    async with EricApp(logged(5), start="logs").run_test(size=(80, 24)) as pilot:
        await begun(pilot)
        assert not _sources(pilot).display
        await pilot.press("s")
        assert _sources(pilot).display
        await pilot.press("s")
        assert not _sources(pilot).display


async def test_the_chosen_line_is_copied_whole() -> None:
    async with EricApp(logged(100), start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.press("c")
        assert pilot.app.clipboard.endswith(f"ERROR   console.runtime.runtime: {MESSAGES[4]} (99)")
        await pilot.press("up", "up", "up", "c")
        assert pilot.app.clipboard.endswith(f"INFO    w1: {MESSAGES[2]} (97)")
        assert "■ paused" in bottom_row(pilot)


async def test_a_click_chooses_a_line() -> None:
    async with EricApp(logged(100), start="logs").run_test() as pilot:
        await begun(pilot)
        await pilot.click(LogView, offset=(30, 3))
        chosen = view_of(pilot).chosen
        assert chosen is not None
        assert any(row in screen_text(pilot.app).splitlines()[5] for row in chosen.rows)


async def test_what_is_shown_is_saved_where_the_operator_says(tmp_path: Path) -> None:
    async with EricApp(logged(10), start="logs").run_test(notifications=True, size=(140, 40)) as pilot:
        await begun(pilot)
        await pilot.press("v", "v", "v", "e")
        await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))
        assert "Save 3 lines of the log" in screen_text(pilot.app)
        pilot.app.screen.query_one(Input).value = str(tmp_path / "errors.txt")
        await pilot.press("enter")
        await until(pilot, lambda: "Saved 3 lines to" in screen_text(pilot.app))
    lines = (tmp_path / "errors.txt").read_text().splitlines()
    assert [line.split()[2] for line in lines] == ["ERROR"] * 3
    assert lines[0].endswith("api: port 8000 is taken")


async def test_access_lines_are_a_source_of_their_own_hidden_until_asked_for() -> None:
    link = logged(0)
    for at in range(4):
        link.log(f"GET /health 200 in 0.00{at} s", source="api.access")
    more(link, 0)
    async with EricApp(link, start="logs").run_test(size=(120, 40)) as pilot:
        await begun(pilot)
        assert len(shown(pilot)) == 3
        assert "3 of 7 lines  hidden: access 4" in bottom_row(pilot)
        await pilot.press("h")
        assert len(shown(pilot)) == 7
        await pilot.press("escape")
        assert len(shown(pilot)) == 7
        await pilot.press("h")
        await pilot.press("s")
        _sources(pilot).table.move_to(1)
        await until(pilot, lambda: {line.source for line in view_of(pilot).lines.shown} == {"access"})
        assert "4 of 7 lines, access" in bottom_row(pilot)
        assert "hidden" not in bottom_row(pilot)


async def test_the_level_says_how_many_lines_of_which_levels_it_hides() -> None:
    async with EricApp(logged(50), start="logs").run_test(size=(120, 40)) as pilot:
        await begun(pilot)
        await pilot.press("v", "v")
        await until(pilot, lambda: "22 of 53 lines  hidden: debug 10, info 21" in bottom_row(pilot))


async def test_w_goes_to_the_next_warning_and_from_the_last_to_the_first() -> None:
    async with EricApp(logged(10), start="logs").run_test() as pilot:
        await begun(pilot)
        chosen: list[str] = []
        for key in ("w", "W", "w", "w"):
            await pilot.press(key)
            line = view_of(pilot).chosen
            assert line is not None
            chosen.append(line.message)
        assert [words[-3:] for words in chosen[:3]] == ["(9)", "(8)", "(9)"]
        assert chosen[3] == "[kernels] compiled in 1.2 s"
        assert not view_of(pilot).follows


async def test_without_a_warning_w_says_so() -> None:
    link = FakeLink(scenes.busy())
    link.lines.clear()
    link.log("all is well", source="engine")
    more(link, 0)
    async with EricApp(link, start="logs").run_test(notifications=True) as pilot:
        await begun(pilot)
        await pilot.press("w")
        await until(pilot, lambda: "No warnings or errors." in screen_text(pilot.app))


async def test_another_width_wraps_anew_and_keeps_what_is_at_the_top() -> None:
    async with EricApp(logged(100), start="logs").run_test(size=(140, 40)) as pilot:
        await begun(pilot)
        await pilot.press("pageup")
        top = screen_text(pilot.app).splitlines()[3][40:70]
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert top in screen_text(pilot.app).splitlines()[3]


def _sources(pilot: Pilot[None]) -> LogSources:
    assert isinstance(pilot.app.screen, LogsScreen)
    return pilot.app.screen.query_one(LogSources)


def test_the_logs_look_right(snap_compare: Any) -> None:
    async def ready(pilot: Pilot[None]) -> None:
        await begun(pilot)
        await pilot.press("up", "up")
        await pilot.pause()

    app = EricApp(logged(60), start="logs", theme="ericllm-dark")
    assert snap_compare(app, terminal_size=(120, 40), run_before=ready)


@pytest.mark.parametrize(
    ("size", "keys", "words"),
    [
        (
            (80, 24),
            (),
            (
                "14:02:11  debug  engine   placement",
                "pages on cuda:0 (55)",
                "warm-up 1.9 s (59)",
                "● following  63 lines",
            ),
        ),
        (
            (80, 24),
            ("s",),
            ("Sources", "Log", "▸ all          63", "api          13", "w1           12", "1.9 s (59)", "63 lines"),
        ),
        (
            (120, 40),
            ("v", "v"),
            (
                "▸ all            63",
                "warn   api",
                "error  console",
                "warm-up 1.9 s (59)",
                "26 of 63 lines  hidden: debug 12, info 25",
            ),
        ),
    ],
    ids=["small", "small, sources", "warnings"],
)
def test_the_newest_lines_fit_under_each_other(
    size: tuple[int, int], keys: tuple[str, ...], words: tuple[str, ...]
) -> None:
    app = EricApp(logged(60), start="logs")
    assert shows(app, *words, "^p palette", terminal_size=size, run_before=begun, press=keys)
