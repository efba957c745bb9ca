"""Graphs, bars, tables and numbers, as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.color import Color
from textual.content import Content
from textual.widget import Widget

from console import text
from console.link.protocol import ApiStatus
from console.tui.app import EricApp
from console.tui.screens.dashboard.panels.throughput import LimitStrip, limit_columns, number_lines
from console.tui.widgets.glyphs import wants_ascii
from console.tui.widgets.graph import GUTTER, Curve, Graph, Scale, Span, merged_marks, next_zoom, span_of
from console.tui.widgets.latency import cause_bar
from console.tui.widgets.plot import (
    BarSegment,
    Columns,
    column_of,
    columns,
    draw,
    meter,
    nice_bound,
    seconds_per_column,
    spark,
    stack,
    time_axis,
)
from console.tui.widgets.status_line import status_line
from console.tui.widgets.table import Column, fitting_columns, spread
from engine.backends.base import LoadProgress
from engine.metrics.history import tens_of
from engine.requests.causes import describe
from engine.snapshot import Goodput, Insight, Mark, Second
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text


def _drawn(front: list[float | None], behind: list[float | None], top: float, rows: int, **how: bool) -> list[str]:
    return ["".join(cell.char for cell in row) for row in draw(front, behind, top, rows, **how)]


def test_a_graph_is_measured_against_its_bound_not_against_its_own_values() -> None:
    assert _drawn([0.5, 0.52, 0.5], [], 1.0, 2) == ["   ", "███"]
    assert _drawn([0.0, 0.25, 0.5, 1.0, 7.0, None], [], 1.0, 2) == ["   ██ ", " ▄███ "]


def test_what_is_not_zero_shows_an_eighth() -> None:
    assert _drawn([0.001, 0.0], [], 1.0, 1) == ["▁ "]


def test_the_curve_behind_rises_above_the_one_in_front() -> None:
    top, bottom = draw([0.5], [1.0], 1.0, 2)
    assert (top[0].ink, bottom[0].ink) == ("behind", "front")
    assert draw([0.25], [1.0], 1.0, 1)[0][0] == ("▂", "both")


def test_a_graph_has_an_ascii_form() -> None:
    assert _drawn([0.0, 0.15, 0.5, 1.0], [], 1.0, 1, ascii_only=True) == [" .=#"]


def test_columns_hold_means_of_whole_multiples_of_time_and_never_shift() -> None:
    history = [Second(at=100 + second, output_tokens=second) for second in range(10)]
    pick = lambda second: second.output_tokens  # noqa: E731
    assert columns(history, 3, 5, pick) == [None, 2.0, 7.0]
    assert columns(history[:-1], 3, 5, pick) == [None, 2.0, 6.5]
    assert columns([], 2, 1, pick) == [None, None]


def test_a_mark_lies_in_the_column_of_its_second() -> None:
    assert column_of(97.4, 100.0, 1) == 3
    assert column_of(97.4, 100.0, 5) == 1


@given(st.floats(1e-6, 1e12))
def test_a_bound_is_round_and_not_below_the_value(value: float) -> None:
    bound = nice_bound(value, least=1e-9)
    assert value * (1 - 1e-6) <= bound <= value * 2.01


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6), st.integers(6, 60))
def test_a_stack_fills_its_width_and_hides_nothing(values: list[float], width: int) -> None:
    parts = [BarSegment(value, f"$part-{index}", str(index)) for index, value in enumerate(values)]
    drawn = stack(parts, width)
    assert drawn.cell_length == width
    if sum(values) > 0:
        styles = " ".join(str(span.style) for span in drawn.spans)
        shown = {index for index in range(len(values)) if f"$part-{index}" in styles}
        assert {index for index, value in enumerate(values) if value / sum(values) > 2 / width} <= shown


def test_a_stack_in_ascii_uses_a_letter_for_each_part() -> None:
    parts = [BarSegment(3, "", "w"), BarSegment(1, "", "k"), BarSegment(4, "", ".")]
    assert stack(parts, 8, ascii_only=True).plain == "wwwk...."


def test_a_meter_is_full_at_a_hundred_per_cent_and_bare_where_nothing_is_known() -> None:
    assert str(meter(1.4, 4, "$a").spans[0].style) == "$a"
    assert meter(0.5, 4, "$a").plain == "━━──", "told without colours too"
    assert meter(None, 4, "$a").cell_length == 4
    assert "╸" in meter(0.4, 4, "$a").plain


def test_a_curve_behind_is_shaded_where_colours_cannot_tell_it() -> None:
    rows = draw([0.5], [1.0], 1.0, 2, shaded=True)
    assert [cell.char for row in rows for cell in row] == ["░", "█"]
    rows = draw([0.5], [1.0], 1.0, 2)
    assert [cell.char for row in rows for cell in row] == ["█", "█"]


def test_columns_go_in_the_order_they_say_and_the_last_ones_never() -> None:
    table = [Column("id", 8), Column("from", 6, drop=2), Column("state", 8), Column("worker", 6, drop=1)]
    assert fitting_columns(table, 40) == [0, 1, 2, 3]
    assert fitting_columns(table, 26) == [0, 2, 3]
    assert fitting_columns(table, 18) == [0, 2]
    assert fitting_columns(table, 5) == [0, 2]


@given(st.integers(20, 300))
def test_columns_spread_over_the_width_and_never_beyond(width: int) -> None:
    table = [Column("id", 5, grow=10), Column("state", 8), Column("n", 4)]
    widths, gap = spread(table, width)
    assert sum(widths) + 2 * gap <= width
    assert width - (sum(widths) + 2 * gap) < 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0041, "4.1 ms"),
        (0.0802, "80 ms"),
        (1.238, "1.24 s"),
        (31.2, "31.2 s"),
        (125, "2:05"),
    ],
)
def test_seconds_are_short_and_have_a_unit(value: float | None, shown: str) -> None:
    assert text.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (612, "612"), (1900, "1.9k"), (999.9, "1.0k"), (7.24e9, "7.2B")]
)
def test_counts_are_short(value: float, shown: str) -> None:
    assert text.count(value) == shown


def test_progress_names_phase_and_bytes() -> None:
    assert text.progress(LoadProgress(phase="weights", done=3 * 1024**3, total=9 * 1024**3)) == "weights 3.0/9.0 GiB"
    assert text.progress(LoadProgress(phase="warm_up", done=1, total=3, unit="steps")) == "warming up 1/3"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_load_whose_end_is_not_known_has_no_bar(width: int) -> None:
    snapshot = scenes.loading()
    waiting = LoadProgress(phase="wait", done=0, total=0, unit="steps")
    status = msgspec.structs.replace(snapshot.status, progress=waiting)
    line = status_line(scenes.changed(snapshot, status=status), ApiStatus(), width).plain
    assert ("waiting for another worker" in line) is (width > 80)
    assert "%" not in line
    assert "━" not in line


def test_the_linux_console_and_locales_without_utf_8_get_ascii() -> None:
    assert wants_ascii({"TERM": "linux"}, "utf-8")
    assert wants_ascii({"TERM": "xterm"}, "ANSI_X3.4-1968")
    assert not wants_ascii({"TERM": "xterm"}, "UTF-8")


def test_a_second_that_comes_late_leaves_no_hole_in_a_curve() -> None:
    history = [Second(at=at, running=running) for at, running in ((100.9, 4), (101.99, 5), (103.01, 6), (104.0, 7))]
    assert columns(history, 5, 1, lambda at: at.running) == [4, 5, 5, 6, 7]
    assert Columns(history, 5, 1).missed == []


def test_what_was_not_measured_in_a_second_is_not_carried_on() -> None:
    history = [Second(at=100.0, ttft_p50=0.1), Second(at=101.0), Second(at=103.0, ttft_p50=0.3)]
    assert columns(history, 4, 1, lambda at: at.ttft_p50) == [0.1, None, None, 0.3]


def test_seconds_that_are_missing_are_marked_and_not_drawn_as_a_value() -> None:
    history = [Second(at=100.0, running=4), Second(at=105.0, running=6)]
    assert columns(history, 6, 1, lambda at: at.running) == [4, None, None, None, None, 6]
    assert Columns(history, 6, 1).missed == [1, 2, 3, 4]
    assert Columns(history, 3, 1).missed == [0, 1]


def test_seconds_before_the_clock_was_set_back_are_left_out() -> None:
    history = [Second(at=109.0, running=9), Second(at=100.0, running=1), Second(at=101.0, running=2)]
    assert columns(history, 3, 1, lambda at: at.running) == [None, 1, 2]


@pytest.mark.parametrize("before", [(1000, 1001, 1002.9, 1004), (*range(1000, 1010), *range(1015, 1020)), (5000, 5001)])
def test_gaps_before_the_clock_was_set_back_are_left_out_too(before: Sequence[float]) -> None:
    found = Columns([Second(at=float(at), running=1) for at in (*before, *range(900, 905))], 60, 1)
    assert all(column < 60 for column in found.missed)
    assert found.values(lambda at: at.running)[-5:] == [1] * 5


async def test_missing_seconds_are_dots_on_the_ground_of_a_graph() -> None:
    seconds = tuple(Second(at=scenes.NOW - back, output_tokens=50, running=4) for back in (7, 6, 1, 0))
    app = EricApp(FakeLink(scenes.busy(history=seconds, marks=())))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        graph = app.screen.query_one("#tokens", Graph)
        assert graph.line(graph.size.height - 2).plain.endswith("██····██")


def test_a_time_axis_names_the_age_of_columns() -> None:
    assert time_axis(40, 1) == "      −30 s          −15 s          now"[1:].rjust(40)
    assert "−5 min" in time_axis(80, 5)
    assert "−4 min" in time_axis(135, 2) and " s" not in time_axis(135, 2), "minutes, as the title has"
    assert time_axis(2, 1) == "no"
    for width in (10, 40, 93):
        assert len(time_axis(width, 1)) == width


@given(st.integers(3, 120), st.sets(st.integers(0, 119)))
def test_no_sign_touches_a_word_of_the_axis(width: int, signs: set[int]) -> None:
    axis = time_axis(width, 1, signs)
    assert len(axis) == width
    for word in re.finditer(r"\S+( s| min)?", axis):
        assert re.fullmatch(r"now|−\d+ (s|min)", word[0])
        if word[0] != "now":
            assert not signs & set(range(word.start() - 1, word.end() + 1))


def test_now_stands_at_the_last_column_or_nowhere() -> None:
    assert time_axis(40, 1, {30}).endswith("now")
    for signs in ({39}, {38, 36}, set(range(20, 40))):
        assert "now" not in time_axis(40, 1, signs)


def test_a_label_of_the_axis_that_a_sign_touches_is_left_out() -> None:
    assert time_axis(60, 1, {29}).split() == ["−45", "s", "−15", "s", "now"]


def test_zooms_go_from_a_minute_to_an_hour_and_back() -> None:
    assert [next_zoom(zoom) for zoom in (60, 300, 600, 3600)] == [300, 600, 3600, 60]
    assert [seconds_per_column(zoom, 60, max(600, zoom)) for zoom in (60, 300, 600, 3600)] == [1, 5, 10, 60]
    assert seconds_per_column(600, 70, 600) == 8


def test_an_hour_is_shown_in_tens_of_seconds_and_its_gaps_stay_gaps() -> None:
    past = [Second(at=36_000.0 + at, running=2) for at in range(3600) if not 1200 <= at < 1800]
    span = span_of(scenes.busy(history=tuple(past[-600:]), hour=tens_of(past), marks=()), 3600)
    shown = columns(span.history, 60, 60, lambda at: at.running)
    assert shown == [2.0] * 20 + [None] * 10 + [2.0] * 30
    assert Columns(span.history, 60, 60).missed == list(range(20, 30))
    assert span.history[-1] == past[-1]


def test_several_steps_of_a_knob_are_one_mark() -> None:
    steps = [
        Mark(at=100.0 + step, text="", knob="max_prompts", before=16 - step, after=15 - step) for step in range(13)
    ]
    death = Mark(at=105.0, text="w1 died", kind="worker")
    merged = merged_marks([*steps, death])
    assert [(mark.at, mark.text, mark.kind) for mark in merged] == [
        (100.0, "max prompts 16 → 3", "knob"),
        (105.0, "w1 died", "worker"),
    ]


def test_a_missing_share_is_a_dot_and_not_a_zero() -> None:
    assert spark([None, 0.5, None, 0.0, 1.0], "$primary").plain == " ▄· █"


async def test_a_mark_never_hides_a_bar_and_stands_on_the_axis() -> None:
    seconds = tuple(Second(at=scenes.NOW - back, output_tokens=90 if back % 2 else 0) for back in range(20, -1, -1))
    marks = (Mark(at=scenes.NOW - 3, text="w0 died", kind="worker"), Mark(at=scenes.NOW - 6, text="x"))
    app = EricApp(FakeLink(scenes.busy(history=seconds, marks=marks)))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        graph = app.screen.query_one("#tokens", Graph)
        height = graph.size.height
        assert graph.line(height - 2).plain.endswith("█ █┊█ █ █ ")
        assert graph.line(height - 1).plain[-4] == "✖"
        small = app.screen.query_one("#kv", Graph)
        assert "✖" in small.line(small.size.height - 1).plain
        assert "w0 died" not in "".join(small.line(y).plain for y in range(small.size.height))


@pytest.mark.parametrize(
    ("kinds", "sign"),
    [
        (("knob", "failure", "load"), "✖"),
        (("load", "swap", "knob"), "◇"),
        (("knob", "load"), "▼"),
        (("drain", "warning"), "•"),
        (("drain",), "◒"),
        (("unload",), "○"),
        (("a kind of a newer engine", "knob"), "•"),
    ],
)
async def test_of_several_marks_in_a_column_the_most_important_shows_also_in_the_smallest_terminal(
    kinds: tuple[str, ...], sign: str
) -> None:
    seconds = tuple(Second(at=scenes.NOW - back, output_tokens=90) for back in range(70, -1, -1))
    marks = tuple(Mark(at=scenes.NOW - 20, text=kind, kind=kind) for kind in kinds)
    for size in ((80, 24), (140, 44)):
        app = EricApp(FakeLink(scenes.busy(history=seconds, marks=marks)))
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            graph = app.screen.query_one("#tokens", Graph)
            assert graph.line(graph.size.height - 1).plain[-21] == sign


async def test_the_mouse_reads_the_values_of_one_moment_in_every_graph() -> None:
    seconds = tuple(Second(at=scenes.NOW - back, output_tokens=back, running=4) for back in range(100, -1, -1))
    app = EricApp(FakeLink(scenes.busy(history=seconds, marks=())))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        graph = app.screen.query_one("#tokens", Graph)
        await pilot.hover(graph, offset=(graph.size.width - 6, 2))
        assert graph.line(0).plain.strip() == "■ out tok/s 5"
        assert "running 4" in app.screen.query_one("#requests", Graph).line(0).plain
        assert "14:02:06, 5 s ago" in screen_text(app)
        await pilot.hover("#request-table")
        assert "last 59 s" in screen_text(app)
        await pilot.press("z", "z", "z")
        assert "last 60 min" in screen_text(app)


async def test_a_p95_over_its_slo_says_so_next_to_the_limit() -> None:
    insight = Insight(goodput=Goodput(slo_ttft_s=0.2, slo_itl_s=0.05))
    app = EricApp(FakeLink(scenes.busy(insight=insight)))
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        assert "p95 310 ms > 200 ms" in screen_text(app)
        assert "p95 31 ms ≤ 50 ms" in screen_text(app)


@pytest.mark.parametrize(
    ("slo_s", "colour"), [(0.1, "success"), (0.085, "warning"), (0.05, "error"), (None, "graph-ttft")]
)
async def test_the_headline_latencies_have_the_colour_of_their_slo(slo_s: float | None, colour: str) -> None:
    app = EricApp(FakeLink(scenes.busy(insight=Insight(goodput=Goodput(slo_ttft_s=slo_s)))))
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        assert app.screen.query_one("#stat-ttft Digits").styles.color == Color.parse(app.theme_variables[colour])
    (number,) = [span for span in number_lines(app.view.snapshot, 160).spans if str(span.style) == f"bold ${colour}"][
        :1
    ]
    assert number_lines(app.view.snapshot, 160).plain[number.start : number.end] == "80 ms"


def test_a_column_has_the_limit_of_most_of_its_seconds_and_gaps_stay_gaps() -> None:
    history = [Second(at=float(at), limit="kv_pages" if at % 5 else "none") for at in range(100, 110)]
    assert limit_columns(Columns(history, 3, 5)) == [None, "kv_pages", "kv_pages"]
    assert limit_columns(Columns([Second(at=100.0, limit="none"), Second(at=101.0)], 2, 1)) == ["none", None]
    gap = [Second(at=100.0, limit="step_tokens"), Second(at=105.0, limit="none")]
    assert limit_columns(Columns(gap, 6, 1)) == ["step_tokens", None, None, None, None, "none"]


async def test_a_strip_beneath_the_throughput_says_what_limits_steps_in_colours_and_words() -> None:
    app = EricApp(FakeLink(scenes.busy(marks=())))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        assert app.screen.query_one("#limits").region.y == app.screen.query_one("#tokens").region.bottom
        assert "■ out tok/s  ━ max prompts  ─ no work" in app.screen.query_one("#tokens", Graph).line(0).plain
        strip = app.screen.query_one(LimitStrip).line(0)
        assert strip.plain.startswith(" limit▕─") and strip.plain.endswith("━━━")
        styles = {strip.plain[span.start]: str(span.style) for span in strip.spans}
        assert styles["━"] == "$graph-queued"
        await pilot.press("z", "z", "z")
        assert "━" in app.screen.query_one(LimitStrip).line(0).plain


async def test_the_strip_has_letters_where_the_terminal_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(scenes.busy(marks=())))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        assert app.screen.query_one(LimitStrip).line(0).plain.endswith("MMM")
        assert "# out tok/s  M max prompts  - no work" in app.screen.query_one("#tokens", Graph).line(0).plain


async def test_no_strip_is_shown_where_the_limits_of_steps_are_not_known() -> None:
    app = EricApp(FakeLink(scenes.busy(history=(Second(at=scenes.NOW, output_tokens=3),))))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        assert not app.screen.query_one(LimitStrip).display


def test_few_values_far_above_the_others_are_left_out_of_a_scale_that_clips() -> None:
    usual = [0.03] * 50 + [0.05] * 6
    clips = Scale(text.seconds, least=0.01, clips=True)
    assert clips.top([*usual, *[2.0] * 4]) == clips.top(usual) < 0.1
    assert clips.top([0.03] * 30 + [2.0] * 30) > 2.0
    assert Scale(text.seconds, least=0.01).top([*usual, 2.0]) > 2.0
    assert clips.top([]) == 0.01


class One(App[None]):
    """An app with a widget alone."""

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self._widget = widget

    def compose(self) -> ComposeResult:
        """The widget."""
        yield self._widget


async def test_a_clipped_column_is_marked_at_the_upper_edge() -> None:
    history = [Second(at=float(at), itl_p50=0.03, itl_p95=2.0 if at == 40 else 0.04) for at in range(60)]
    graph = Graph(
        Scale(text.seconds, least=0.01, clips=True),
        Curve(lambda at: at.itl_p50, "$graph-itl"),
        Curve(lambda at: at.itl_p95, "$graph-itl-spread"),
    )
    async with One(graph).run_test(size=(67, 8)) as pilot:
        graph.show(Content("ITL"), Span(history=history))
        await pilot.pause()
        lines = [graph.line(y).plain for y in range(graph.size.height)]
        assert lines[1].count("↑") == 1
        assert lines[1].index("↑") == GUTTER + 40
        assert "↑" not in "".join(lines[2:])


def test_a_bar_of_causes_is_no_wider_than_its_cells_whatever_another_instance_says() -> None:
    why = msgspec.structs.replace(describe({"decode": 1.0}), causes={"decode": 20.0, "prompts": 1e18})
    assert cause_bar(why, 30).cell_length == 30
