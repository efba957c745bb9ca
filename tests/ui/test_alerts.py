"""What goes wrong is seen on every screen: in the status line, a toast, a badge and the list of alerts."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import msgspec
import pytest

from console.link.frames import Frame
from console.link.protocol import ApiStatus
from console.link.recording.recorder import RecordingWriter
from console.tui.alerts import TOAST_AGAIN_S, AlertWatch
from console.tui.app import EricApp
from console.tui.attached_app import AttachedApp
from console.tui.modes import MODES
from console.tui.replay_app import ReplayApp
from console.tui.screens.alerts.screen import AlertsScreen
from console.tui.view import View
from console.tui.widgets.status_line import status_line
from engine.errors import EngineError, ModelLoadFailed
from engine.snapshot import Alert, Percentiles, Snapshot
from tests.fakes import scenes
from tests.fakes.elsewhere import FakeRemote, replay_of
from tests.fakes.link import FakeLink
from tests.ui.seen import listed, rows, screen_text, toasts, until

KILLED = "worker w1 was killed by SIGKILL (probably out of memory)"


def alert(number: int = 1, **changes: object) -> Alert:
    """A worker that was killed."""
    values: dict[str, object] = {
        "id": number,
        "at": scenes.NOW - 5,
        "last_at": scenes.NOW - 5,
        "cause": "worker_died",
        "subject": "w1",
        "text": KILLED,
        "done": "Restarting. 3 of its requests went back to the queue.",
        "advice": "Check the kernel log for the OOM killer.",
    }
    return Alert(**(values | changes))  # type: ignore[arg-type]


def healthy() -> Snapshot:
    """Both workers are ready."""
    return scenes.busy(workers=(scenes.worker(0), scenes.worker(1)))


def after_the_kill(*alerts: Alert) -> Snapshot:
    """One of two workers is dead."""
    workers = (scenes.worker(0), scenes.worker(1, state="restarting", pid=None, active=0, restarts=1))
    return scenes.busy(workers=workers, alerts=alerts or (alert(),))


@pytest.mark.parametrize("mode", [mode.name for mode in MODES])
async def test_a_killed_worker_is_seen_on_every_screen(mode: str) -> None:
    link = FakeLink(healthy())
    app = EricApp(link, start=mode)
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        await until(pilot, lambda: "2/2 workers" in rows(app)[0])
        assert "▲" not in rows(app)[1]
        link.show(after_the_kill())
        await until(pilot, lambda: "▲ 1/2 workers" in rows(app)[0])
        await until(pilot, lambda: bool(toasts(app)))
        assert [KILLED in each for each in toasts(app)] == [True]
        if mode != "logs":
            assert "▲ 1 alert" in rows(app)[0]
            assert "Logs▲" in rows(app)[1]
        app.action_alerts()
        await until(pilot, lambda: "Check the kernel log" in screen_text(app))
        assert "went back to the queue" in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, AlertsScreen) and "Logs▲" not in rows(app)[1])
        assert "alert" not in rows(app)[0]


async def test_a_key_opens_the_list_and_closes_it() -> None:
    app = EricApp(FakeLink(after_the_kill()))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("A")
        await until(pilot, lambda: "14:02:06  w1" in screen_text(app))
        await pilot.press("A")
        await until(pilot, lambda: not isinstance(app.screen, AlertsScreen))


async def test_an_alert_of_another_day_has_its_date() -> None:
    yesterday = alert(count=2, at=scenes.NOW - 86_400, last_at=scenes.NOW - 86_400 + 5)
    app = EricApp(FakeLink(after_the_kill(yesterday)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("A")
        await until(pilot, lambda: "2026-05-28 14:02:16  w1" in screen_text(app))
        assert "2 times since 2026-05-28 14:02:11" in screen_text(app)


async def test_without_alerts_the_list_says_what_would_be_in_it() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        await pilot.press("A")
        await until(pilot, lambda: "No alerts." in screen_text(app))


async def test_an_alert_that_occurs_again_has_its_badge_at_once_and_a_toast_half_a_minute_after_its_last() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        link.show(after_the_kill())
        await until(pilot, lambda: "Logs▲" in rows(app)[1])
        await pilot.press("7")
        await until(pilot, lambda: app.current_mode == "logs")
        await pilot.press("1")
        await until(pilot, lambda: app.current_mode == "dashboard" and "Logs▲" not in rows(app)[1])
        link.show(after_the_kill(alert(count=2, last_at=scenes.NOW)))
        await until(pilot, lambda: "Logs▲" in rows(app)[1])
        assert len(toasts(app)) == 1
        again = alert(count=3, last_at=scenes.NOW + TOAST_AGAIN_S)
        link.show(scenes.changed(after_the_kill(again), at=scenes.NOW + TOAST_AGAIN_S))
        await until(pilot, lambda: len(toasts(app)) == 2)
        assert f"{KILLED} (3 times)" in toasts(app)[1]
        await pilot.press("A")
        await until(pilot, lambda: "3 times since 14:02:06" in screen_text(app))


async def test_a_key_clears_the_list_in_this_console_until_an_alert_occurs_again() -> None:
    link = FakeLink(after_the_kill())
    app = EricApp(link)
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await pilot.press("A")
        await until(pilot, lambda: "14:02:06  w1" in screen_text(app))
        await pilot.press("c")
        await until(pilot, lambda: "No alerts." in screen_text(app))
        assert toasts(app) == ["Cleared 1 alert in this console. GET /admin/alerts has them."]
        link.show(after_the_kill(alert(count=2, last_at=scenes.NOW)))
        await until(pilot, lambda: "2 times since 14:02:06" in screen_text(app))


def test_each_alert_is_due_once_for_each_time_that_it_occurs_and_twice_in_half_a_minute_never() -> None:
    watch, seconds = AlertWatch(), []
    view = View.read(FakeLink(healthy()))
    watch.follow(view)
    for second in range(100):
        count = 1 + (second >= 5) + (second >= 70)
        moment = scenes.changed(after_the_kill(alert(count=count)), at=scenes.NOW + second)
        seconds += [second for _ in watch.follow(dataclasses.replace(view, published=moment))]
    assert seconds == [0, 30, 70]


async def test_alerts_from_before_the_console_was_opened_have_a_badge_and_no_toast() -> None:
    app = AttachedApp([FakeRemote("10.0.0.7:8000", after_the_kill())])
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        await until(pilot, lambda: "Logs▲" in rows(app)[1])
        assert toasts(app) == []


async def test_many_alerts_at_once_have_one_toast() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        link.show(after_the_kill(*(alert(number, subject=f"w{number}") for number in range(1, 8))))
        await until(pilot, lambda: bool(toasts(app)))
        assert toasts(app) == ["7 new alerts: A lists them."]


async def test_a_failed_load_is_said_once() -> None:
    link = FakeLink()
    error = ModelLoadFailed("the checkpoint has no tokenizer")
    link.failures["unload"] = error
    app = EricApp(link)
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        link.show(after_the_kill(alert(text=f"m could not be loaded: {error.message}", cause="load_failed")))
        await until(pilot, lambda: bool(toasts(app)))
        app.perform(link.unload())
        await app.workers.wait_for_complete()
        assert len(toasts(app)) == 1


async def test_a_recording_shows_its_alerts(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    with RecordingWriter(path) as writer:
        for at in range(20):
            moment = scenes.changed(healthy() if at < 10 else after_the_kill(), at=scenes.NOW - 20 + at)
            writer.add(Frame(snapshot=moment, api=ApiStatus()), [])
    replay, clock = replay_of(path)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await until(pilot, lambda: "2/2" in rows(app)[0])
        clock.now += 12
        await until(pilot, lambda: "▲ 1/2 workers" in rows(app)[0])
        await until(pilot, lambda: [KILLED in each for each in toasts(app)] == [True])
        await pilot.press("A")
        await until(pilot, lambda: "Check the kernel log" in screen_text(app))


WIDTHS = [78, 98, 158, 218]
"""Cells of the header in terminals of 80, 100, 160 and 220 columns."""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_status_line_says_what_is_wrong_in_every_width(width: int) -> None:
    snapshot = scenes.changed(after_the_kill(), queued=41, errors_per_min=2)
    line = status_line(snapshot, ApiStatus(running=True, port=8143), width, alerts=2)
    assert line.cell_length == width
    for words in ("ready", "▲ 1/2", "queue 41", "✖ 2", "API", ":8143", "14:02:11"):
        assert words in line.plain
    assert "▲2" in line.plain or "▲ 2 alerts" in line.plain
    assert "on, 0 " not in line.plain.replace("on, 0 clients", "")


@pytest.mark.parametrize("width", WIDTHS)
def test_requests_refused_while_the_engine_drains_or_the_api_stops_count_as_errors(width: int) -> None:
    snapshot = scenes.changed(scenes.cpu_idle(), errors_per_min=2)
    assert "✖ 5 err" in status_line(snapshot, ApiStatus(running=True, refused_per_min=3), width).plain


@pytest.mark.parametrize("width", WIDTHS)
def test_a_drain_says_how_long_it_lasts_in_every_width(width: int) -> None:
    snapshot = scenes.changed(after_the_kill(), errors_per_min=2)
    snapshot = scenes.changed(snapshot, draining_since=snapshot.at - 42)
    assert "◒ draining 42 s" in status_line(snapshot, ApiStatus(running=True), width, alerts=2).plain


SERVED = ApiStatus(running=True)
HEALTHY = scenes.changed(scenes.cpu_idle(), requests=())
SLOW = msgspec.structs.replace(
    HEALTHY.insight, goodput=msgspec.structs.replace(HEALTHY.insight.goodput, slo_ttft_s=0.001)
)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("snapshot", "api", "alerts", "colour"),
    [
        (HEALTHY, SERVED, 0, ""),
        (HEALTHY, SERVED, 1, "$warning"),
        (HEALTHY, ApiStatus(error=EngineError("port 8000 is taken").info), 0, "$error"),
        (HEALTHY, ApiStatus(running=True, host="0.0.0.0", no_auth=True), 0, "$error"),
        (scenes.changed(HEALTHY, errors_per_min=1), SERVED, 0, "$error"),
        (HEALTHY, ApiStatus(running=True, refused_per_min=1), 0, "$error"),
        (scenes.changed(HEALTHY, draining_since=HEALTHY.at), SERVED, 0, "$warning"),
        (scenes.changed(HEALTHY, insight=SLOW, ttft=Percentiles(p50=0.1, p95=0.3)), SERVED, 0, "$warning"),
    ],
    ids=["well", "alert", "API failed", "open API", "errors", "refused", "draining", "SLO missed"],
)
def test_the_models_name_and_state_have_the_colour_of_the_worst(
    width: int, snapshot: Snapshot, api: ApiStatus, alerts: int, colour: str
) -> None:
    line = status_line(snapshot, api, width, alerts=alerts)
    styles = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
    name, state = next(each for each in styles if "demo" in each), "● ready"
    assert (styles[name], styles[state]) == (
        f"bold {colour or '$foreground'}",
        colour or "$worker-busy",
    )


SIZES = [(80, 24), (220, 60)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("start", "keys"),
    [
        ("dashboard", ["A"]),
        ("dashboard", ["d"]),
        ("dashboard", ["i"]),
        ("dashboard", ["enter"]),
        ("dashboard", ["question_mark"]),
        ("models", ["e"]),
        ("models", ["space", "down", "v"]),
        ("chat", ["ctrl+s"]),
    ],
    ids=["alerts", "devices", "worker", "request", "help", "model", "comparison", "chat settings"],
)
async def test_every_page_and_dialog_has_the_header_in_its_first_row(
    size: tuple[int, int], start: str, keys: list[str]
) -> None:
    link = FakeLink(healthy())
    app = EricApp(link, start=start)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.current_mode == start and "ready" in rows(app)[0])
        if start == "models":
            await listed(pilot)
        await pilot.press(*keys)
        await pilot.pause()
        link.show(scenes.changed(after_the_kill(), queued=41, errors_per_min=2))
        await until(pilot, lambda: all(words in rows(app)[0] for words in ("▲ 1/2", "queue 41", "✖ 2", "14:02:11")))


def test_a_worker_on_its_first_start_is_no_warning_and_none_ready_is_an_error() -> None:
    coming = scenes.busy(workers=(scenes.worker(0), scenes.worker(1, state="loading")))
    assert "◌ 1/2 workers" in status_line(coming, ApiStatus(), 160).plain
    dead = scenes.busy(workers=tuple(scenes.worker(each, state="failed") for each in range(2)))
    assert "✖ 0/2 workers" in status_line(dead, ApiStatus(), 160).plain


async def test_a_logs_screen_made_ahead_marks_no_alert_as_seen() -> None:
    link = FakeLink(healthy())
    app = EricApp(link)
    async with app.run_test(size=(160, 40)) as pilot:
        await until(pilot, lambda: "2/2 workers" in rows(app)[0])
        link.show(after_the_kill())
        await until(pilot, lambda: "Logs▲" in rows(app)[1])
        app.make_screen("logs")
        await pilot.pause()
        app.refresh_screen()
        await until(pilot, lambda: "Logs▲" in rows(app)[1])
        assert "▲ 1 alert" in rows(app)[0]


async def test_a_warning_in_the_log_has_a_badge_until_logs_was_shown() -> None:
    link = FakeLink(healthy())
    app = EricApp(link)
    async with app.run_test(size=(160, 40)) as pilot:
        await until(pilot, lambda: "2/2 workers" in rows(app)[0])
        for level, badge in ((logging.INFO, False), (logging.WARNING, True)):
            link.log("something", level=level)
            link.change(log_total=len(link.lines))
            app.refresh_screen()
            await until(pilot, lambda: ("Logs▲" in rows(app)[1]) == badge)  # noqa: B023 - called here
        await pilot.press("7")
        await until(pilot, lambda: app.current_mode == "logs")
        await pilot.press("1")
        await until(pilot, lambda: app.current_mode == "dashboard" and "Logs▲" not in rows(app)[1])
