"""The workload view of Tune: what it shows, resetting the counters, and how it looks."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from console.link.readonly import ReadOnlyLink
from console.link.rpc import as_link
from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.tune.screen import TuneScreen
from console.tui.screens.tune.workload import WorkloadPanel, WorkloadSection
from tests.fakes import insight_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, until

pytestmark = pytest.mark.long

WIDE, SMALL = (120, 50), (80, 24)
OPEN = ["v", "v"]


def an_app(**changes: Any) -> tuple[EricApp, FakeLink]:
    link = FakeLink(insight_scenes.hours_of_work(**changes))
    return EricApp(link, start="tune"), link


async def opened(pilot: Pilot[Any]) -> TuneScreen:
    await until(pilot, lambda: isinstance(pilot.app.screen, TuneScreen))
    await pilot.press(*OPEN)
    await until(pilot, lambda: "Latency breakdown" in screen_text(pilot.app))
    await pilot.pause()
    assert isinstance(pilot.app.screen, TuneScreen)
    return pilot.app.screen


async def settled(pilot: Pilot[Any]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


# --- opening ----------------------------------------------------------------------------------------------------------


async def test_v_goes_through_all_views_and_escape_back_to_the_changes() -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await until(pilot, lambda: "Effect of changes" in screen_text(app))
        for words in ("No autotune results yet", "Latency breakdown", "Benchmark results", "Effect of changes"):
            await pilot.press("v")
            await until(pilot, lambda: words in screen_text(app))  # noqa: B023
        await pilot.press("v", "v", "escape")
        await until(pilot, lambda: "Effect of changes" in screen_text(app))


@pytest.mark.parametrize("size", [SMALL, (100, 30), (160, 48), (220, 60)])
async def test_a_click_on_a_title_shows_its_view(size: tuple[int, int]) -> None:
    app, _ = an_app()
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "Benchmarks" in screen_text(app))
        line = next(at for at, row in enumerate(rows(app)) if "Workload" in row)
        await pilot.click(offset=(rows(app)[line].index("Workload") + 2, line))
        await until(pilot, lambda: "Latency breakdown" in screen_text(app))


async def test_its_keys_are_entries_of_the_palette_and_can_be_clicked() -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        assert "Reset the counters of the session" in {entry.title for entry in entries(screen)}
        assert "Reset counters" in rows(app)[-1]
        await pilot.press("escape")
        await pilot.pause()
        assert "Reset counters" not in rows(app)[-1]


# --- what it shows ----------------------------------------------------------------------------------------------------


async def test_latency_goodput_lengths_and_context_are_there() -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        seen = screen_text(app)
        for text in (
            "Latency breakdown",
            "TTFT within 500 ms · mean ITL within 50 ms",
            "93% · 3,703 of 3,981 requests",
            "6,904 of 8,192 tokens",
            "82.3k of 100k",
        ):
            assert text in seen


async def test_it_follows_the_engine_while_it_is_open() -> None:
    app, link = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        link.show(insight_scenes.hours_of_work(longest_context_tokens=7777))
        await until(pilot, lambda: "7,777 of 8,192" in screen_text(app))


async def test_what_did_not_change_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app, link = an_app()
    drawn: list[str | None] = []
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        update = WorkloadSection.update

        def noted(self: WorkloadSection, *arguments: Any, **named: Any) -> None:
            drawn.append(self.id)
            update(self, *arguments, **named)

        monkeypatch.setattr(WorkloadSection, "update", noted)
        app.refresh_screen()
        assert drawn == []
        link.show(insight_scenes.hours_of_work(longest_context_tokens=7777))
        app.refresh_screen()
        assert drawn == ["workload-context"]


async def test_drafts_are_shown_only_where_there_are_any() -> None:
    app, link = an_app(drafts=())
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        assert "Draft acceptance" not in screen_text(app)
        link.show(insight_scenes.hours_of_work())
        await until(pilot, lambda: "Draft acceptance" in screen_text(app))


async def test_on_a_small_terminal_it_is_one_column_that_scrolls_to_the_end() -> None:
    app, _ = an_app()
    async with app.run_test(size=SMALL) as pilot:
        await opened(pilot)
        assert "6,904 of 8,192" not in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "6,904 of 8,192 tokens · 84%" in screen_text(app))


async def test_a_terminal_without_blocks_gets_ascii_and_letters() -> None:
    app, _ = an_app()
    app.set_class(True, "-ascii")
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "qqpdddd" in screen_text(app))
        text = screen_text(app)
        for words in ("####", "q queue", "=====--", "Draft acceptance by position"):
            assert words in text
        assert text.isascii()


async def test_without_colours_the_phases_are_told_by_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        seen = screen_text(app)
        assert "d decode" in seen
        assert "qqpddddd" in seen


# --- resetting --------------------------------------------------------------------------------------------------------


async def test_resetting_the_counters_asks_once() -> None:
    app, link = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("R")
        assert isinstance(app.screen, ConfirmScreen)
        assert link.commands == []
        await pilot.press("y")
        await settled(pilot)
        assert link.names() == ["reset"]
        await until(pilot, lambda: "No finished requests yet" in screen_text(app))


async def test_a_reset_can_be_cancelled() -> None:
    app, link = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("R", "n")
        await settled(pilot)
        assert isinstance(app.screen, TuneScreen)
        assert link.commands == []


async def test_a_read_only_console_offers_no_reset() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(insight_scenes.one_answer()))), start="tune")
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        assert app.screen.query(WorkloadPanel)
        assert "Reset counters" not in rows(app)[-1]


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_hours_of_work_look_right(snap_compare: Any) -> None:
    app, _ = an_app()
    assert snap_compare(app, terminal_size=WIDE, press=OPEN)


def test_one_answer_has_a_histogram_with_labelled_columns() -> None:
    app = EricApp(FakeLink(insight_scenes.one_answer()), start="tune")
    assert shows(app, "■ prefill    310 ms", "≤32", "p50 24  p90 24", terminal_size=WIDE, press=OPEN)


def test_nothing_yet_is_a_sentence_in_each_section() -> None:
    words = "No finished answers yet", "■ queue           –", "No SLO set.", "no model is loaded"
    app = EricApp(FakeLink(scenes.empty()), start="tune")
    assert shows(app, *words, "No finished requests yet", terminal_size=(100, 40), press=OPEN)
