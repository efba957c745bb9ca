"""The Insight page: opened from anywhere, what it shows, counting anew, measuring, and how it looks."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from console.link.readonly import ReadOnlyLink
from console.link.rpc import as_link
from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.insight.screen import InsightPanel, InsightScreen
from engine.errors import EngineBusy
from tests.fakes import insight_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, until

pytestmark = pytest.mark.long

WIDE, SMALL = (120, 40), (80, 24)


def an_app(**changes: Any) -> tuple[EricApp, FakeLink]:
    link = FakeLink(insight_scenes.hours_of_work(**changes))
    return EricApp(link), link


async def opened(pilot: Pilot[Any]) -> InsightScreen:
    await pilot.press("n")
    await until(pilot, lambda: isinstance(pilot.app.screen, InsightScreen))
    await pilot.pause()
    assert isinstance(pilot.app.screen, InsightScreen)
    return pilot.app.screen


async def settled(pilot: Pilot[Any]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digit", ["1", "2", "4", "7"])
async def test_it_opens_from_any_screen_and_closes_again(digit: str) -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press(digit)
        await pilot.pause()
        before = app.screen
        await opened(pilot)
        await pilot.press("escape")
        assert app.screen is before
        await opened(pilot)
        await pilot.press("n")
        assert app.screen is before


async def test_it_is_an_entry_of_the_palette() -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE):
        titles = [entry.title for entry in entries(app.screen)]
        assert any(title.startswith("Insight") for title in titles)


async def test_its_keys_are_entries_of_the_palette_and_can_be_clicked() -> None:
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        screen = await opened(pilot)
        found = {entry.title for entry in entries(screen)}
        assert {"Reset the counters of the session", "Close insight"} <= found
        assert "Reset counters" in rows(app)[-1]


# --- what it shows ----------------------------------------------------------------------------------------------------


async def test_every_number_of_the_issue_is_there() -> None:
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
            "527 tok/s generated",
            "0.84 J per token",
            "1.24 kWh · 0.38 EUR",
            "642 of 936 GB/s",
            "19 of 71 TFLOP/s",
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
        update = InsightPanel.update

        def noted(self: InsightPanel, *arguments: Any, **named: Any) -> None:
            drawn.append(self.id)
            update(self, *arguments, **named)

        monkeypatch.setattr(InsightPanel, "update", noted)
        app.refresh_screen()
        assert drawn == []
        link.show(insight_scenes.hours_of_work(longest_context_tokens=7777))
        app.refresh_screen()
        assert drawn == ["insight-context"]


async def test_guesses_are_shown_only_where_there_are_any() -> None:
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
        assert "Device utilisation" not in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "311 of 936 GB/s" in screen_text(app))


async def test_nothing_yet_is_said_and_not_drawn() -> None:
    app = EricApp(FakeLink(scenes.empty()))
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        seen = screen_text(app)
        assert "No answer has ended yet" in seen
        assert "No worker holds a model" in seen
        assert "no model is loaded" in seen


async def test_a_terminal_without_blocks_gets_ascii() -> None:
    app, _ = an_app()
    app.set_class(True, "-ascii")
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        assert screen_text(app).isascii()


async def test_without_colours_the_phases_are_told_by_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app, _ = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        seen = screen_text(app)
        assert "d decode" in seen
        assert "qqpddddd" in seen


# --- counting anew ----------------------------------------------------------------------------------------------------


async def test_counting_anew_asks_once() -> None:
    app, link = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("r")
        assert isinstance(app.screen, ConfirmScreen)
        assert link.commands == []
        await pilot.press("y")
        await settled(pilot)
        assert link.names() == ["reset"]
        await until(pilot, lambda: "0 ended" in screen_text(app))
        assert "1.24 kWh" in screen_text(app)


async def test_counting_anew_can_be_thought_better_of() -> None:
    app, link = an_app()
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("r", "n")
        await settled(pilot)
        assert isinstance(app.screen, InsightScreen)
        assert link.commands == []


# --- measuring --------------------------------------------------------------------------------------------------------


async def test_the_processor_is_measured_on_demand() -> None:
    link = FakeLink(insight_scenes.one_answer())
    app = EricApp(link)
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert link.names() == ["measure"]


async def test_a_refusal_is_shown() -> None:
    link = FakeLink(insight_scenes.one_answer())
    link.failures["measure"] = EngineBusy("The processor can only be measured while no request is running")
    app = EricApp(link)
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await pilot.press("l")
        await settled(pilot)
        assert "can only be measured" in list(app._notifications)[-1].message


async def test_a_read_only_console_offers_neither() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(insight_scenes.one_answer()))))
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        assert "esc Close" in rows(app)[-1]
        assert "Reset counters" not in rows(app)[-1]
        assert "Measure" not in rows(app)[-1]


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_hours_of_work_look_right(snap_compare: Any) -> None:
    app, _ = an_app()
    assert snap_compare(app, terminal_size=WIDE, press=["n"])


def test_a_small_terminal_has_one_column() -> None:
    session = "Session", "busy       61%", "2.6M generated · 904k prefilled", "batch      average 6.3"
    times = (
        "Latency breakdown",
        "■ queue       12 ms  710 ms",
        "■ decode     5.21 s",
        "95%",
        "Goodput",
        "93% · 3,703 of 3,981",
    )
    assert shows(an_app()[0], *session, *times, "How requests ended", "stop", terminal_size=SMALL, press=["n"])


def test_the_end_of_the_page_can_be_scrolled_to() -> None:
    lengths = (
        "Answers, in tokens",
        "p50 549  p90 1,448  p99 3,104  longest 6,210",
        "Context",
        "6,904 of 8,192 tokens · 84%",
    )
    devices = (
        "Draft acceptance by position",
        "+1 ",
        "+4 ",
        "Device utilisation",
        "GPU0   compute",
        "GPU1   compute",
        "memory",
    )
    assert shows(an_app()[0], *lengths, *devices, "esc Close", terminal_size=SMALL, press=["n", "end"])


def test_one_answer_on_a_processor_has_no_power_and_no_peak() -> None:
    app = EricApp(FakeLink(insight_scenes.one_answer()))
    words = "60 generated · 21 prefilled", "average 1.0", "p50 24  p90 24", "■ prefill    310 ms"
    assert shows(app, *words, "power not reported", "not measured", "2.4 GB/s", terminal_size=WIDE, press=["n"])


def test_nothing_yet_is_a_sentence_in_each_panel() -> None:
    session = "No answer has ended yet.", "0 ended", "0 generated · 0 prefilled"
    times = "Latency breakdown", "■ queue           –", "No worker holds a model.", "No SLO is set."
    end = "No request has ended yet.", "– no device is in use", "esc Close"
    assert shows(EricApp(FakeLink(scenes.empty())), *session, *times, *end, terminal_size=(100, 30), press=["n"])


async def test_without_block_characters_bars_are_letters() -> None:
    app, _ = an_app()
    app.set_class(True, "-ascii")
    async with app.run_test(size=WIDE) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "qqpdddd" in screen_text(app))
        text = screen_text(app)
        for words in ("+- Session", "####", "q queue", "=====--", "+- Draft acceptance by position", "compute ===---"):
            assert words in text
        assert text.isascii()
