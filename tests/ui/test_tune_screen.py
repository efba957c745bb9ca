"""The Tune screen: knobs that turn, what each change did, undo, and a plot of the settings seen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from console.tui.app import EricApp
from console.tui.screens.tune.changes import EffectTable, delta_cell
from console.tui.screens.tune.screen import knob_lines
from console.tui.widgets.graph import Point, place
from console.tuning.effects import Delta
from console.tuning.knobs import IDLE_UNLOADS_S, knob_text, next_idle_unload
from engine.backends.base import BackendStats, ItlReport
from engine.errors import InsufficientMemory
from engine.snapshot import Snapshot
from tests.fakes import fleet_scenes, scenes, tune_scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, until


def _app(snapshot: Snapshot | None = None, **how: Any) -> EricApp:
    return EricApp(FakeLink(snapshot or tune_scenes.tuned()), start="tune", **how)


def _link(app: EricApp) -> FakeLink:
    assert isinstance(app.link, FakeLink)
    return app.link


async def _ready(pilot: Pilot[None]) -> EffectTable:
    await until(pilot, lambda: bool(pilot.app.screen.query(EffectTable)))
    table = pilot.app.screen.query_one(EffectTable)
    await until(pilot, lambda: bool(table.rows) or "No changes yet" in screen_text(pilot.app))
    await pilot.pause()
    return table


# -- what is seen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 50)])
async def test_knobs_changes_and_their_effects_are_seen_at_every_size(size: tuple[int, int]) -> None:
    app = _app()
    async with app.run_test(size=size) as pilot:
        await _ready(pilot)
        seen = screen_text(app)
        for words in (
            "2 ready, 1 starting",
            "14 of 64 slots in use",
            "15 min",
            "max prompts 8 → 16",
            "↑ better +40%",
            "max prompts 16 → 32",
            "↑ worse +68%",
            "≈ same",
            "◌ waiting until the workers are there",
            "2×16",
        ):
            assert words in seen, words
        await pilot.press("end")
        await until(pilot, lambda: all(words in screen_text(app) for words in ("workers 1 → 2", "↑ better +84%")))


async def test_the_change_under_the_cursor_is_told_in_full() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("end")
        await until(pilot, lambda: "191 → 350  ↑ better +84%" in screen_text(app))
        assert "over 17 requests, 60 s before and 60 s after; u sets workers back to 1" in screen_text(app)


async def test_a_load_that_changed_is_said_and_no_number_given() -> None:
    app = _app(tune_scenes.changed_load())
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("down", "down", "down")
        seen = screen_text(app)
        assert seen.count("◇ not comparable: the load changed from 17 to 61 requests") == 2


async def test_a_terminal_of_100x30_has_rows_of_changes_above_the_details() -> None:
    app = _app()
    async with app.run_test(size=(100, 30)) as pilot:
        table = await _ready(pilot)
        assert table.size.height >= 4, "the head and three changes"
        assert "u sets max prompts back" in screen_text(app) or "u sets workers back" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40)])
async def test_the_hint_of_an_empty_table_of_changes_is_seen_in_full(size: tuple[int, int]) -> None:
    app = _app(scenes.busy(marks=()))
    async with app.run_test(size=size) as pilot:
        await _ready(pilot)
        hint = "s sends sample requests for 30 s."
        await until(pilot, lambda: hint in " ".join(screen_text(app).replace("│", " ").split()))


async def test_with_no_change_it_says_how_to_make_one() -> None:
    app = _app(scenes.cpu_idle())
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        assert "No changes yet." in screen_text(app)
        assert "Needs 10 s of load." in screen_text(app)
        await pilot.press("u")
        assert _link(app).names() == []


async def test_effects_are_measured_while_another_screen_is_seen() -> None:
    app = EricApp(FakeLink(tune_scenes.tuned()))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: len(app.effects.found) == 5)
        link, snapshot = _link(app), tune_scenes.tuned()
        link.show(scenes.changed(snapshot, history=snapshot.history[-30:]))
        app.refresh_screen()
        assert [effect.outcome for effect in app.effects.found].count("measured") == 4


# -- what can be done -------------------------------------------------------------------------------------------------


async def test_u_sets_the_knob_of_the_selected_change_back() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("down", "down", "down", "u")
        await until(pilot, lambda: _link(app).names() == ["reconfigure"])
        assert _link(app).commands == [("reconfigure", {"max_prompts": 16})]


async def test_u_undoes_the_newest_change_where_none_is_selected() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("u")
        await until(pilot, lambda: _link(app).commands == [("reconfigure", {"num_workers": 2})])


async def test_idle_unload_can_be_undone_too() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("down", "down", "u")
        await until(pilot, lambda: _link(app).commands == [("reconfigure", {"idle_unload_s": 0})])


async def test_nothing_is_done_where_the_knob_is_there_already() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        _link(app).show(
            scenes.changed(
                tune_scenes.tuned(),
                models=(msgspec.structs.replace(tune_scenes.tuned().models[0], target_workers=2),),
            )
        )
        app.refresh_screen()
        await pilot.press("u")
        await pilot.pause()
        assert _link(app).names() == []


async def test_an_undo_that_is_refused_says_why() -> None:
    app = _app()
    _link(app).failures["reconfigure"] = InsufficientMemory("another worker does not fit: 2.1 GiB are lacking")
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _ready(pilot)
        await pilot.press("u")
        await until(pilot, lambda: "another worker does not fit" in " ".join(screen_text(app).split()))


async def test_of_several_models_the_change_s_own_is_turned_back() -> None:
    marks = tune_scenes.tuned().marks
    app = _app(scenes.changed(fleet_scenes.two_models(), marks=marks, history=tune_scenes.tuned().history))
    async with app.run_test(size=(140, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("end")
        await until(pilot, lambda: "NeuralHermes-7B: workers 1 → 2" in screen_text(app))
        await pilot.press("u")
        await until(pilot, lambda: bool(_link(app).commands))
        assert _link(app).commands == [("reconfigure", {"num_workers": 1, "model": "NeuralHermes-7B"})]


async def test_idle_unload_is_turned_by_keys_and_by_clicks() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("full_stop")
        await until(pilot, lambda: len(_link(app).commands) == 1)
        line = rows(app)[5]
        assert "idle unload" in line
        assert await pilot.click(offset=(line.index("−"), 5))
        await until(pilot, lambda: len(_link(app).commands) == 2)
        assert _link(app).commands == [
            ("reconfigure", {"idle_unload_s": 3600}),
            ("reconfigure", {"idle_unload_s": 900}),
        ]


@pytest.mark.parametrize(
    ("key", "knobs"),
    [
        ("right_curly_bracket", {"step_tokens": 1024}),
        ("left_curly_bracket", {"step_tokens": 256}),
        ("greater_than_sign", {"threads": 1}),
    ],
)
async def test_step_tokens_and_threads_have_keys(key: str, knobs: dict[str, int]) -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "step tokens" in screen_text(app) and "auto" in screen_text(app)
        await pilot.press(key)
        await until(pilot, lambda: _link(app).commands == [("reconfigure", knobs)])


def test_an_itl_target_is_named_beside_the_step_tokens_that_it_decides_on() -> None:
    workers = (scenes.worker(0, stats=BackendStats(itl=ItlReport(target_s=0.05))), scenes.worker(1))
    assert "prefill and decode together" in knob_lines(scenes.busy()).plain
    assert "the ITL target of 50 ms decides" in knob_lines(scenes.busy(workers=workers)).plain
    assert max(line.cell_length for line in knob_lines(scenes.busy(workers=workers)).split("\n")) <= 78


async def test_l_plots_against_the_other_latency_and_z_over_another_time() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        assert "vs. ITL p95" in screen_text(app) and "last 5 min" in screen_text(app)
        await pilot.press("l", "z")
        assert "vs. TTFT p95" in screen_text(app) and "last 9 min" in screen_text(app)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_idle_unload_steps_through_its_values_and_stops_at_both_ends() -> None:
    seen, now = [], 0.0
    for _ in range(7):
        now = next_idle_unload(now, -1)
        seen.append(now)
    assert seen == [14400, 3600, 900, 300, 60, 60, 60]
    assert [next_idle_unload(value, 1) for value in IDLE_UNLOADS_S] == [*IDLE_UNLOADS_S[1:], 0]
    assert next_idle_unload(120, 1) == 300 and next_idle_unload(120, -1) == 60


@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("num_workers", 2.0, "2"),
        ("idle_unload_s", 0, "never"),
        ("idle_unload_s", 45, "45 s"),
        ("idle_unload_s", 300, "5 min"),
        ("idle_unload_s", 5400, "1.5 h"),
        ("threads", 0, "auto"),
        ("threads", 4, "4"),
    ],
)
def test_a_knob_s_value_is_told_as_one_says_it(knob: str, value: float, said: str) -> None:
    assert knob_text(knob, value) == said


@pytest.mark.parametrize(
    ("delta", "said"),
    [
        (Delta(100, 138, "better"), "↑ better +38%"),
        (Delta(0.3, 0.2, "better"), "↓ better -33%"),
        (Delta(100, 101, "same"), "≈ same +1%"),
        (Delta(0.01, 0.5, "worse"), "↑ worse ×50"),
        (None, "–"),
    ],
)
def test_a_difference_is_a_glyph_a_word_and_a_number(delta: Delta | None, said: str) -> None:
    assert delta_cell(delta)[0][0] == said


@given(
    st.lists(
        st.builds(Point, st.floats(0, 1e3), st.floats(0, 1e5), st.sampled_from(["1×8", "16×128"]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(3, 60),
    st.integers(1, 12),
)
def test_every_point_is_within_the_plot_whatever_its_size(points: list[Point], width: int, height: int) -> None:
    cells = place(points, width, height)
    assert len(cells) == height and all(len(row) == width for row in cells)
    drawn = sum(cell.char in "●○" for row in cells for cell in row)
    assert 1 <= drawn <= len(points)


def test_points_beside_each_other_have_both_their_names() -> None:
    drawn = place([Point(30, 500, "2×16"), Point(46, 510, "2×32", now=True)], 40, 6)
    text = "\n".join("".join(cell.char for cell in row) for row in drawn)
    assert "○" in text and "●" in text and "2×16" in text and "2×32" in text


# -- pictures ---------------------------------------------------------------------------------------------------------


async def _third(pilot: Pilot[None]) -> None:
    await _ready(pilot)
    await pilot.press("down", "down", "down")
    await until(pilot, lambda: "u sets max prompts back to 16" in screen_text(pilot.app))
    await pilot.pause()


def test_tuning_looks_right(snap_compare: Any) -> None:
    assert snap_compare(_app(), terminal_size=(120, 40), run_before=_third)


def test_tuning_fits_a_small_terminal() -> None:
    app = _app(tune_scenes.changed_load())
    knobs = (
        "workers       −    3     +",
        "max prompts   −    32    +",
        "per worker · 14 of 64 slots in use",
        "idle unload",
    )
    plots = "■ out tok/s 514", "tok/s vs. ITL p95", "2×16", "Effect of changes", "workers 2 → 3", "↑ better +40%"
    assert shows(app, *knobs, *plots, "u sets max prompts back to 16", terminal_size=(80, 24), run_before=_third)


async def test_a_sample_load_asks_while_requests_run_and_is_stopped_by_the_same_key() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("s")
        await until(pilot, lambda: "Send sample requests for 30 s?" in screen_text(app))
        assert _link(app).names() == []
        await pilot.press("y")
        await until(pilot, lambda: "sample load: 32 clients, 30 s left; s stops it" in screen_text(app))
        await pilot.press("s")
        await until(pilot, lambda: "sample load" not in screen_text(app))
    assert _link(app).names() == ["start_load", "stop_load"]


async def test_a_sample_load_needs_a_model() -> None:
    app = _app(scenes.empty())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await _ready(pilot)
        await pilot.press("s")
        await until(pilot, lambda: "No model loaded. Press 2 to load one." in screen_text(app))
    assert _link(app).names() == []


async def test_keys_read_the_values_of_a_moment_as_the_mouse_does() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: "Throughput at 14:02:1" in screen_text(app))
        newest = screen_text(app)
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: "Throughput at 14:02:0" in screen_text(app) and screen_text(app) != newest)
        await pilot.press("right_parenthesis", "right_parenthesis")
        await until(pilot, lambda: "Throughput at" not in screen_text(app))
