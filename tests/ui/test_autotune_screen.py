"""Autotune on the Tune screen: how it goes is seen as it grows, keys begin, stop and use it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from console.link.tuning import Failed, TuneOrder, TuningReport
from console.tui.app import EricApp
from console.tui.screens.tune.autotune import TuneFormScreen, points_of
from console.tui.widgets.graph import Point, place
from console.tuning.autotune.space import Setting
from engine.errors import EngineBusy
from tests.fakes import tune_scenes
from tests.fakes.elsewhere import FakeRemote
from tests.fakes.link import FakeLink
from tests.ui.seen import choose, screen_text, shows, until

pytestmark = pytest.mark.long

SIZES = [(80, 24), (120, 40), (160, 50)]


def _app(report: TuningReport | None = None, **how: Any) -> EricApp:
    link = FakeLink(tune_scenes.tuned())
    link.script["tuning.report"] = report or TuningReport()
    return EricApp(link, start="tune", **how)


def _link(app: EricApp) -> FakeLink:
    assert isinstance(app.link, FakeLink)
    return app.link


async def _shown(pilot: Pilot[None], words: str) -> None:
    await until(pilot, lambda: words in " ".join(screen_text(pilot.app).split()))


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_tried_and_found_is_seen_at_every_size(size: tuple[int, int]) -> None:
    app = _app(tune_scenes.found())
    async with app.run_test(size=size) as pilot:
        await _shown(pilot, "autotune running")
        for words in ("● best", "◆ front", "1,420", "8 tried (of up to 540)", "✓ met", "ITL p95", "tried:"):
            assert words in screen_text(app), words


async def test_a_run_that_begins_is_shown_in_place_of_the_changes_and_v_shows_those_again() -> None:
    app = _app()
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _shown(pilot, "Effect of changes")
        await pilot.press("v")
        await _shown(pilot, "No autotune results yet.")
        _link(app).script["tuning.report"] = tune_scenes.found()
        app.refresh_screen()
        await _shown(pilot, "8 tried (of up to 540)")
        assert "Effect of changes" not in screen_text(app)
        await pilot.press("escape")
        await _shown(pilot, "Effect of changes")
        await pilot.press("v")
        await _shown(pilot, "● best")


async def _formed(pilot: Pilot[None]) -> None:
    """The form, from the Tune screen."""
    await _shown(pilot, "Effect of changes")
    await pilot.press("f")
    await until(pilot, lambda: isinstance(pilot.app.screen, TuneFormScreen))
    await _shown(pilot, "minutes 10")


async def test_f_asks_with_what_before_it_begins() -> None:
    app = _app()
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _formed(pilot)
        await _shown(pilot, "reload the model")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, TuneFormScreen))
        assert _link(app).names() == []
        await _formed(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: _link(app).commands == [("start", {"order": TuneOrder()})])
        await until(pilot, lambda: not isinstance(app.screen, TuneFormScreen))


@pytest.mark.parametrize("size", SIZES)
async def test_knobs_and_settings_are_chosen_and_stay_as_they_were(size: tuple[int, int]) -> None:
    app = _app()
    async with app.run_test(size=size) as pilot:
        await _formed(pilot)
        await pilot.press("ctrl+o", "down", "space", "down", "down", "down", "space")
        await pilot.press("tab", *"5", "tab", *"400ms", "tab", "tab", "tab", *"8")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, TuneFormScreen))
        await pilot.press("f")
        await _shown(pilot, "400ms")
        await pilot.press("enter")
        order = TuneOrder(minutes=5, slo_ttft_s=0.4, users=8, fixed=("max_prompts", "cache_bits"))
        await until(pilot, lambda: _link(app).commands == [("start", {"order": order})])


async def test_a_bad_setting_is_told_at_its_field() -> None:
    app = _app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _formed(pilot)
        await pilot.press("tab", *"soon", "enter")
        await _shown(pilot, "✖ Soon is not a duration; examples: 500ms, 0.5s")
        assert app.focused is not None and app.focused.has_class("-wrong")
        assert _link(app).names() == []


@pytest.mark.parametrize("size", SIZES)
async def test_the_form_begins_with_minutes_and_slo_and_a_key_shows_all_of_it(size: tuple[int, int]) -> None:
    app = _app()
    async with app.run_test(size=size) as pilot:
        await _formed(pilot)
        for words in ("max TTFT", "max ITL", "Start (enter)"):
            assert words in screen_text(app), words
        assert "percentile" not in screen_text(app)
        await pilot.press("ctrl+o")
        await _shown(pilot, "ShareGPT")
        for words in ("● draft tokens", "percentile", "answer tokens", "Start (enter)"):
            assert words in screen_text(app), words


async def test_where_no_slo_is_set_the_results_have_no_column_for_it() -> None:
    app = _app(msgspec.structs.replace(tune_scenes.found(), slo_ttft_s=None, slo_itl_s=None))
    async with app.run_test(size=(160, 50)) as pilot:
        await _shown(pilot, "no SLO set")
        assert "✓ met" not in screen_text(app) and "goodput" not in screen_text(app)


async def test_elsewhere_no_trace_is_asked_for() -> None:
    link = FakeRemote("gpu:8000", tune_scenes.tuned())
    app = EricApp(link, start="tune")
    async with app.run_test(size=(120, 40)) as pilot:
        await _formed(pilot)
        await _shown(pilot, "Traces need")
        assert "ShareGPT" not in screen_text(app)


async def test_the_palette_has_it_on_every_screen_and_goes_to_the_tune_screen_once_it_began() -> None:
    link = FakeLink(tune_scenes.tuned())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await choose(app, "Autotune…")
        await until(pilot, lambda: isinstance(app.screen, TuneFormScreen))
        await _shown(pilot, "minutes 10")
        await pilot.press("enter")
        await until(pilot, lambda: app.current_mode == "tune" and not isinstance(app.screen, TuneFormScreen))
        assert link.names() == ["start"]


async def test_f_stops_what_goes_on() -> None:
    app = _app(tune_scenes.found())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _shown(pilot, "autotune running")
        await pilot.press("f")
        await _shown(pilot, "○ cancelled")
        assert _link(app).names() == ["cancel"]


async def test_w_uses_what_was_found_and_only_once_it_was() -> None:
    app = _app(tune_scenes.found())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _shown(pilot, "autotune running")
        await pilot.press("w")
        await _shown(pilot, "No best settings yet.")
        _link(app).script["tuning.report"] = tune_scenes.found("done")
        app.refresh_screen()
        await _shown(pilot, "meets the latency SLO")
        await pilot.press("w")
        await until(pilot, lambda: _link(app).names() == ["use_best"])


async def test_a_refusal_is_said_and_the_form_stays() -> None:
    app = _app()
    _link(app).failures["start"] = EngineBusy("Autotune is already running. Cancel it first.")
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _formed(pilot)
        await pilot.press("enter")
        await _shown(pilot, "✖ Autotune is already running. Cancel it first")
        assert isinstance(app.screen, TuneFormScreen)


async def test_settings_that_failed_and_what_else_happened_are_told_above_the_table() -> None:
    report = msgspec.structs.replace(
        tune_scenes.found(),
        notes=("somebody turned workers to 3: run discarded, setting restored",),
        failed=(Failed(setting=Setting(cache_bits=8), reason="no answer within the measurement time"),),
    )
    app = _app(report)
    async with app.run_test(size=(160, 50)) as pilot:
        await _shown(pilot, "cache bits 8: no answer within the measurement time (and 1 more)")


def test_the_plot_has_the_best_the_front_and_the_others() -> None:
    report = tune_scenes.found()
    points = points_of(report, ttft=False)
    assert [point.label for point in points if point.now] == ["2×32"]
    assert sum(point.front for point in points) == 6
    drawn = "".join(cell.char for row in place(points, 60, 12) for cell in row)
    assert drawn.count("●") == 1 and "◆" in drawn and "○" in drawn


def test_a_setting_whose_latency_is_not_known_is_no_point() -> None:
    report = tune_scenes.found()
    unknown = msgspec.structs.replace(report.tried[0], ttft_s=None)
    assert len(points_of(msgspec.structs.replace(report, tried=(unknown, *report.tried[1:])), ttft=True)) == 7


def test_the_point_that_counts_is_drawn_over_others() -> None:
    drawn = place([Point(1, 1, "a", now=True), Point(1, 1, "b", front=True), Point(1, 1, "c")], 20, 4)
    assert [cell.char for row in drawn for cell in row if cell.char in "●◆○"] == ["●"]


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_settings_that_were_tried_are_listed_under_the_plot() -> None:
    words = "Knobs", "workers", "Throughput", "tok/s vs. ITL", "Autotune", "● best"
    assert shows(_app(tune_scenes.found()), *words, "f Stop autotune", terminal_size=(120, 40))


def test_what_was_found_looks_right_on_a_small_terminal_in_the_light_theme(snap_compare: Any) -> None:
    async def done(pilot: Pilot[None]) -> None:
        await _shown(pilot, "Effect of changes")
        await pilot.press("v")
        await _shown(pilot, "● best")
        await pilot.pause()

    app = _app(tune_scenes.found("done"), theme="ericllm-light")
    assert snap_compare(app, terminal_size=(80, 24), run_before=done)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["small", "wide"])
def test_the_form_of_autotune_fits(size: tuple[int, int]) -> None:
    async def formed(pilot: Pilot[None]) -> None:
        await _formed(pilot)
        await pilot.press("ctrl+o", "down", "down", "down", "space")
        await _shown(pilot, "stays" if size[0] > 80 else "○ threads")

    knobs = "● workers", "max TTFT", "● max prompts", "max ITL", "○ threads", "● cache bits", "● draft tokens", "trace"
    end = "Client requests take priority", "not tuned", "Start (enter)    Advanced (ctrl+o)    Cancel (esc)"
    assert shows(_app(), "Autotune", *knobs, *end, terminal_size=size, run_before=formed)
