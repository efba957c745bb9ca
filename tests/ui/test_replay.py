"""A recording in the console: what it shows, pausing, going through it, its speed, and that it takes no orders."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.tui.replay_app import ReplayApp
from console.tui.screens.attach.replay import GoToScreen, PlayReading, replay_bar
from tests.fakes import scenes
from tests.fakes.elsewhere import RECORDED_S, recording_of, replay_of
from tests.ui.seen import rows, screen_text, shows, toasts, until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording_of(scenes.busy(), tmp_path_factory.mktemp("recordings") / "night.rec")


async def test_it_plays_pauses_and_goes_on(night: Path) -> None:
    replay, clock = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "▸ playing ×1" in screen_text(app))
        assert "EricLLM · night.rec · ◆ recording · NeuralHermes-7B" in rows(app)[0]
        clock.now += 42
        await until(pilot, lambda: "0:42 of 5:00" in screen_text(app))
        await until(pilot, lambda: "queued 42" in screen_text(app))
        await pilot.press("space")
        clock.now += 42
        await until(pilot, lambda: "◇ paused" in screen_text(app))
        await until(pilot, lambda: "queued 42" in screen_text(app))
        await pilot.press("space")
        clock.now += 3
        await until(pilot, lambda: "queued 45" in screen_text(app))


async def test_keys_go_through_it(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        for key, second in (
            ("right", 10),
            ("shift+right", 70),
            ("left", 60),
            ("shift+left", 0),
            ("left", 0),
            ("end", RECORDED_S),
            ("home", 0),
        ):
            await pilot.press(key)
            await until(pilot, lambda second=second: replay.snapshot().queued == second)  # type: ignore[misc]


async def test_the_speed_is_changed(night: Path) -> None:
    replay, clock = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press(">", ">", ">")
        await until(pilot, lambda: "×10" in screen_text(app))
        clock.now += 12
        await until(pilot, lambda: replay.snapshot().queued == 120)
        await pilot.press("<")
        await until(pilot, lambda: "×5" in screen_text(app))


async def test_a_time_is_typed_and_what_is_none_is_said(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("g")
        await until(pilot, lambda: isinstance(app.screen, GoToScreen))
        await pilot.press(*"soon", "enter")
        await until(pilot, lambda: "Not a time" in screen_text(app))
        await pilot.press(*["backspace"] * 4, *"14:00", "space", "enter")
        await until(pilot, lambda: replay.snapshot().queued == RECORDED_S - 131)


async def test_the_bar_is_clicked(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "5:00" in screen_text(app))
        row = next(number for number, text in enumerate(rows(app)) if "of 5:00" in text)
        middle = rows(app)[row].index("─") + rows(app)[row].count("─") // 2
        await pilot.click(offset=(middle, row))
        await until(pilot, lambda: abs(replay.snapshot().queued - RECORDED_S // 2) <= 3)


async def test_commands_are_refused_with_one_sentence(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app.perform(app.link.reconfigure(num_workers=3))
        await until(pilot, lambda: any("This is a recording" in toast for toast in toasts(app)))
        await pilot.press("q")
        await pilot.pause()
        assert app._exit


async def test_a_recording_is_asked_for_nothing_and_says_why_a_key_does_nothing(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.pause()
        for number in range(1, 9):
            await pilot.press(f"f{number}")
            await pilot.pause()
        await pilot.press("f2")
        await until(pilot, lambda: "A recording holds no list of models." in screen_text(app))
        assert toasts(app) == []
        await pilot.press("f1", "x")
        await until(pilot, lambda: toasts(app) == ["This is a recording: nothing can be changed"])


async def test_the_log_is_shown_as_far_as_it_had_come(night: Path) -> None:
    replay, _ = replay_of(night)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("7")
        await pilot.pause()
        assert "port 8000 is taken" not in screen_text(app)
        await pilot.press("end")
        await until(pilot, lambda: "port 8000 is taken" in screen_text(app))
        await pilot.press("home")
        await until(pilot, lambda: "port 8000 is taken" not in screen_text(app))


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_the_bar_fits_every_width(width: int) -> None:
    bar = replay_bar(PlayReading(130.0, 100.0, 4000.0, 0.5, True), width)
    assert bar.cell_length <= width
    assert "paused ×0.5" in bar.plain


def test_a_replay_looks_right(night: Path, snap_compare: object) -> None:
    replay, clock = replay_of(night)
    clock.now += 200
    assert snap_compare(ReplayApp(replay), terminal_size=(120, 40), press=["space"])  # type: ignore[operator]


def test_a_replay_has_its_bar_above_the_keys_of_a_small_terminal(night: Path) -> None:
    replay, clock = replay_of(night)
    clock.now += 200
    words = (
        "night.rec",
        "◆ recording",
        "▲ 1/2",
        "queue 200",
        "◇ paused ×1",
        "2026-05-29 14:00:31",
        "space Pause",
        "← −10 s",
    )
    assert shows(ReplayApp(replay), *words, terminal_size=(80, 24), press=["space"])


@pytest.fixture
def cut(night: Path, tmp_path: Path) -> Path:
    """The recording without its last byte."""
    path = tmp_path / "cut.rec"
    path.write_bytes(night.read_bytes()[:-1])
    return path


async def test_a_recording_that_is_cut_off_says_so_at_once_and_at_its_end(cut: Path) -> None:
    replay, _ = replay_of(cut)
    app = ReplayApp(replay)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.pause()
        assert toasts(app) == [replay.recording.damage]
        assert "◆ recording" in rows(app)[0]
        await pilot.press("end")
        await until(pilot, lambda: "is damaged or truncated" in screen_text(app) and "recording" not in rows(app)[0])
