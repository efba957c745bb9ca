"""Advice on the dashboard: no row where there is none, one line each, a key and a click that do it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from console.adviser import Advice, Look, Turn
from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.dashboard.panels.advice import AdvicePanel, advice_line, first_actionable
from console.tui.screens.worker.screen import WorkerScreen
from engine.config import DeviceShare
from engine.errors import InvalidRequest
from engine.snapshot import Snapshot
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, toasts, until

_SHARE = DeviceShare(
    device="cuda:0",
    layers=32,
    weights_bytes=int(9.4 * scenes.GIB),
    kv_bytes=int(6.1 * scenes.GIB),
    working_bytes=int(1.2 * scenes.GIB),
)


def crowded(**changes: Any) -> Snapshot:
    """Requests wait though there is room in the cache, answers reach the context, and a third card stands empty."""
    cut = [
        msgspec.structs.replace(row, prompt_tokens=7900, output_tokens=292, max_tokens=292)
        if row.finish == "length"
        else row
        for row in scenes.requests()
    ]
    waiting = tuple(msgspec.structs.replace(second, queued=18, running=16) for second in scenes.history())
    values: dict[str, Any] = {
        "devices": (
            scenes.gpu(0),
            scenes.gpu(1),
            scenes.gpu(
                2,
                utilisation=0.0,
                weights_bytes=0,
                kv_bytes=0,
                work_bytes=0,
                free_bytes=int(22.5 * scenes.GIB),
                power_w=31.0,
                temperature_c=34.0,
            ),
        ),
        "workers": tuple(scenes.worker(index, active=8, used=(_SHARE,)) for index in range(2)),
        "requests": tuple(cut),
        "queued": 18,
        "running": 16,
        "history": waiting,
    }
    return scenes.busy(**(values | changes))


QUEUE = "18 requests wait"


def _queued() -> FakeLink:
    """Nothing but a queue."""
    return FakeLink(crowded(requests=scenes.requests()))


async def _settled(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def test_there_is_no_row_where_there_is_nothing_to_say() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert app.screen.query_one(AdvicePanel).size.height == 0
        assert "t Advice" not in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40)])
async def test_each_piece_of_advice_is_one_line_and_leaves_the_requests_their_room(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(crowded()))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        said = [row for row in rows(app) if "▲" in row]
        assert 1 <= len(said) <= 3
        assert "8,192 tokens" in said[0]
        assert "t open Models" in said[0]
        assert screen_text(app).count("● decode") >= 4
        assert "t Advice" in rows(app)[-1]


async def test_t_turns_the_knob_and_the_advice_waits_for_its_effect() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "18 requests wait, all 16 slots are in use: KV pages are 71% full, 10 at a time fit." in screen_text(app)
        await pilot.press("t")
        await _settled(pilot)
        assert QUEUE not in screen_text(app)
    assert link.commands == [("reconfigure", {"max_prompts": 10})]


async def test_a_click_on_what_can_be_done_does_it() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        at = next(at for at, row in enumerate(rows(app)) if QUEUE in row)
        await pilot.click(offset=(20, at))
        assert link.commands == []
        await pilot.click(offset=(rows(app)[at].index("max prompts +2") + 3, at))
        await _settled(pilot)
    assert link.commands == [("reconfigure", {"max_prompts": 10})]


async def test_a_knob_that_cannot_be_turned_says_why() -> None:
    link = _queued()
    link.failures["reconfigure"] = InvalidRequest("max_prompts is 10, and at most 9 fit")
    app = EricApp(link)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.pause()
        await pilot.press("t")
        await _settled(pilot)
        assert "max_prompts is 10, and at most 9 fit" in toasts(app)


async def test_advice_is_dismissed_for_good_by_key_and_by_click() -> None:
    link = FakeLink(crowded())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("T")
        await pilot.pause()
        assert "8,192 tokens, before" not in screen_text(app)
        at = next(at for at, row in enumerate(rows(app)) if QUEUE in row)
        await pilot.click(offset=(rows(app)[at].rindex("×"), at))
        later = link.current.at + 3600
        link.show(msgspec.structs.replace(link.current, at=later, uptime_s=link.current.uptime_s + 3600))
        app.refresh_screen()
        await pilot.pause()
        assert QUEUE not in screen_text(app)
    assert link.commands == []


async def test_advice_that_is_a_screen_goes_there() -> None:
    app = EricApp(FakeLink(crowded()))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("t")
        await pilot.pause()
        assert app.current_mode == "models"


async def test_advice_is_on_tune_too_and_the_same_key_takes_it() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("5")
        await until(pilot, lambda: "t max prompts +" in screen_text(app))
        await pilot.press("t")
        await until(pilot, lambda: link.names() == ["reconfigure"])


async def test_advice_about_a_worker_opens_it() -> None:
    slow = scenes.worker(0), scenes.worker(1, slowness=5.0)
    link = FakeLink(scenes.busy(workers=slow))
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        for second in range(12):
            link.show(scenes.busy(workers=slow, at=scenes.NOW + second, uptime_s=8120.0 + second))
            app.refresh_screen()
        await pilot.pause()
        assert "open w1" in screen_text(app)
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, WorkerScreen)


async def test_the_palette_has_advice_only_where_there_is_some() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    does = "Apply the advice"
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert does not in {entry.title for entry in entries(app.screen)}
        link.show(crowded(at=scenes.NOW + 2))
        app.refresh_screen()
        await pilot.pause()
        assert does in {entry.title for entry in entries(app.screen)}
        assert "Dismiss the advice for this session" in {entry.title for entry in entries(app.screen)}


async def test_advice_names_the_key_that_takes_it() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        app.set_keymap({"advice.take": "y"})
        link.show(msgspec.structs.replace(link.current, at=link.current.at + 2, queued=19))
        app.refresh_screen()
        await pilot.pause()
        assert "y max prompts +2" in screen_text(app)
        await pilot.press("y")
        await _settled(pilot)
    assert link.commands == [("reconfigure", {"max_prompts": 10})]


async def test_advice_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(crowded()))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        drawn = rows(app)[:-1]
    assert [char for row in drawn for char in row if ord(char) > 126 and not char.isalnum()] == []


@pytest.mark.parametrize("width", [40, 60, 78, 120, 200])
def test_a_line_is_never_wider_than_its_panel(width: int) -> None:
    advice = Advice("queue", "A sentence with 12 numbers, " * 5, "Brief: 12", Turn("max_prompts", -2))
    assert advice_line(advice, 0, width, key="t", more=2).cell_length == width


def test_the_key_does_the_first_that_can_be_done() -> None:
    none = Advice("prefix_useless", "Only 0.4%", "Only 0.4%")
    some = Advice("slow_worker", "w1 makes 20 tok/s", "w1", Look("w1"), "w1")
    assert first_actionable((none, some)) == 1
    assert first_actionable((none,)) is None


def test_advice_is_under_the_requests_one_row_each() -> None:
    lines = (
        "▲ 3 of 9 answers cut off",
        "t open Models  ×",
        "▲ 18 requests wait for 16",
        "+1  max prompts +2  ×",
        "t Advice",
    )
    assert shows(EricApp(FakeLink(crowded())), "Requests", *lines, terminal_size=(100, 30))


async def test_what_is_advised_is_found_while_another_screen_is_seen() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("7")
        await pilot.pause()
        queued = crowded(requests=scenes.requests())
        link.show(msgspec.structs.replace(queued, at=queued.at + 2))
        app.refresh_screen()
        assert any(QUEUE in advice.sentence for advice in app.adviser.advice)


async def test_t_applies_nothing_that_no_longer_holds_and_says_so() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.pause()
        assert QUEUE in screen_text(app)
        app._clock.stop()  # no frame between the last one and the key
        link.change(queued=0, running=0)
        await pilot.press("t")
        await _settled(pilot)
        assert "Not applied, as this no longer holds: 18 requests wait for 16 slots" in toasts(app)
    assert link.commands == []


async def test_t_turns_a_knob_no_further_than_the_engine_of_now_asks_for() -> None:
    link = FakeLink(crowded(requests=scenes.requests(), queued=40, kv_usage=0.1))
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "max prompts +20" in screen_text(app)
        app._clock.stop()
        link.change(queued=18)
        await pilot.press("t")
        await _settled(pilot)
    assert link.commands == [("reconfigure", {"max_prompts": 17})]


async def test_a_queue_is_the_same_number_in_the_advice_and_in_the_panel() -> None:
    link = _queued()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        link.change(queued=12, at=link.current.at + 0.25)
        app.refresh_screen()
        await pilot.pause()
        assert "12 requests wait" in screen_text(app)
        assert "12 queued" in screen_text(app)
