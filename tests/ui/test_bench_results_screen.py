"""Results of benches on a screen: listed, plotted, opened, compared and forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from console.bench.comparison import compare
from console.bench.result import read_result
from console.tui.screens.benches.comparison import difference_notes
from console.tui.screens.dialogs import LineScreen
from tests.fakes import bench_scenes
from tests.ui.benching import SIZES, app_with, link_of, opened, shown
from tests.ui.seen import screen_text, shows, toasts, until

pytestmark = pytest.mark.long

# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_results_and_a_plot_of_the_selected_one_are_seen_at_every_size(size: tuple[int, int]) -> None:
    app = app_with()
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await shown(pilot, "◇ 1.34 s mean response, users 2")
        for words in ("2026-05-29 11:30", "1,148.0 tok/s output, workers", "mean response (s)", "█"):
            await shown(pilot, words)


async def test_nothing_measured_yet_says_how_to_begin() -> None:
    app = app_with(results=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("b")
        await shown(pilot, "No results yet. Press n to run a benchmark.")


async def test_p_plots_the_next_number_of_the_result_and_shift_p_the_one_before() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "p plots another of 6 numbers")
        await pilot.press("p", "p")
        await shown(pilot, "requests (req/s) ─")
        await pilot.press("P")
        await shown(pilot, "vs. fewest users (x) ──")


async def test_o_plots_the_number_from_run_to_run() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "o")
        await shown(pilot, "mean response (s) of users 4, over time")
        plot = screen_text(app).partition("over time")[2]
        assert plot.index("2026-05-29 08:05") < plot.index("2026-05-28 09:15")
        assert "2026-05-29 11:30" not in plot, "it was cut short before that row"
        assert "2026-05-28 17:40" not in plot, "that is another bench"


async def test_o_leaves_out_results_of_other_work_and_says_how_many() -> None:
    app = app_with()
    results = link_of(app).benches.results
    results[1] = msgspec.structs.replace(results[1], settings={**results[1].settings, "requests": 8})
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "o")
        await shown(pilot, "over time, 1 result with other workloads left out")
        plot = screen_text(app).partition("over time")[2]
        assert "2026-05-29 08:05" in plot and "2026-05-28 09:15" not in plot


async def test_enter_opens_a_result_with_its_machine_spread_and_what_others_got() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "enter")
        await shown(pilot, "#3")
        for words in (
            "AMD EPYC",
            "±5%",
            "lower is better",
            "Published results on other hardware",
            "a server in a study",
        ):
            assert words in screen_text(app), words
        await pilot.press("right", "right")
        await shown(pilot, "requests, req/s higher is better")


async def test_a_result_that_was_cut_short_says_so() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("enter")
        await shown(pilot, "Ended early; partial results.")


async def test_w_saves_the_result_for_programs_and_its_plot_where_the_operator_says(tmp_path: Path) -> None:
    app, exports = app_with(), tmp_path / "data" / "ericllm" / "exports"
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "enter")
        await shown(pilot, "#3")
        await pilot.press("w")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        assert app.screen.query_one(Input).value == str(exports / "bench-users-3.json")
        await pilot.press("enter")
        await until(pilot, lambda: any("Saved to" in toast for toast in toasts(app)))
        assert read_result(exports / "bench-users-3.json") == link_of(app).benches.results[3]
        assert (exports / "bench-users-3.csv").read_text().startswith("bench,started,users,repeat,response_s")
        assert (exports / "bench-users-3.svg").exists()


def saved_below(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*.*") if each.suffix in (".json", ".csv", ".svg")]


@pytest.mark.parametrize("name", ["x/../../keys.", "/../..", "\x00" + "n" * 60])
async def test_a_result_of_another_instance_is_saved_among_the_exports_whatever_it_is_called(
    name: str, tmp_path: Path
) -> None:
    app, folder = app_with(), tmp_path / "data" / "ericllm" / "exports"
    results = link_of(app).benches.results
    results[3] = msgspec.structs.replace(results[3], name=name)
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "enter", "w")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        await pilot.press("enter")
        await until(pilot, lambda: any("Saved to" in toast for toast in toasts(app)))
    written = saved_below(tmp_path)
    assert {(file.parent, file.suffix) for file in written} == {(folder, f".{kind}") for kind in ("json", "csv", "svg")}


@pytest.mark.parametrize("started", ["yesterday", "", "9999-12-31T23:59:59", "0001-01-01", "\x1b[2J" * 9])
async def test_results_of_another_instance_are_listed_whenever_they_began(started: str) -> None:
    app = app_with()
    results = link_of(app).benches.results
    results[3] = msgspec.structs.replace(results[3], started=started)
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "enter")
        await shown(pilot, "#3")


async def test_the_marked_result_is_compared_with_the_selected_one_the_older_first() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("C")
        await shown(pilot, "Mark a result with space")
        await pilot.press("down", "space", "end", "C")
        await shown(pilot, "before (1) after (3)")
        for words in ("-30.0%", "better", "≈ same", "1.62 ±5%", "1.13 ±5%"):
            assert words in screen_text(app), words
        await pilot.press("d")
        await until(pilot, lambda: "≈ same" not in screen_text(app))


async def test_a_compares_the_numbers_too_that_a_table_leaves_out() -> None:
    app = app_with()
    results = link_of(app).benches.results
    for number in (1, 3):
        rows = tuple(
            msgspec.structs.replace(row, values={**row.values, "p90_itl_ms": [7.0, 7.5, 8.0]})
            for row in results[number].rows
        )
        results[number] = msgspec.structs.replace(results[number], rows=rows)
    async with app.run_test(size=(140, 50)) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "space", "end", "C")
        await shown(pilot, "before (1) after (3)")
        assert "ITL p90" not in screen_text(app)
        await pilot.press("a")
        await shown(pilot, "ITL p90 (ms) 7.5 ±7%")
        await pilot.press("a")
        await until(pilot, lambda: "ITL p90" not in screen_text(app))


def test_a_comparison_without_a_spread_says_first_that_there_is_no_verdict() -> None:
    found = compare(bench_scenes.grid(), bench_scenes.grid())
    assert difference_notes(found).plain.startswith("One repeat has no spread")


async def test_results_of_different_benches_are_not_compared() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("down", "space", "down", "C")
        await shown(pilot, "cannot be compared")


async def test_a_result_is_deleted_after_a_question() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await opened(pilot)
        await shown(pilot, "mean response (s)")
        await pilot.press("d")
        await shown(pilot, "Delete result 4?")
        await pilot.press("y")
        await until(pilot, lambda: link_of(app).commands == [("forget", {"number": 4})])
        await until(pilot, lambda: "3 results" in screen_text(app))


async def test_a_history_that_is_slow_to_read_keeps_no_key_waiting() -> None:
    app = app_with()
    link_of(app).hold("history")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("b")
        await shown(pilot, "Benchmark results")
        await pilot.press("escape")
        await shown(pilot, "Effect of changes")
        link_of(app).release("history")


# -- pictures ---------------------------------------------------------------------------------------------------------


async def _results(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await shown(pilot, "p plots another of")
    await pilot.press("down")
    await shown(pilot, "0.85")
    await pilot.pause()


def test_results_look_right(snap_compare: Any) -> None:
    assert snap_compare(app_with(), terminal_size=(120, 40), run_before=_results)


def test_a_comparison_has_a_row_for_each_number_and_the_settings_that_differ() -> None:
    async def compared(pilot: Pilot[None]) -> None:
        await opened(pilot)
        await shown(pilot, "p plots another of")
        await pilot.press("down", "space", "end", "C")
        await shown(pilot, "before (1) after (3)")

    link_app = app_with()
    results = link_of(link_app).benches.results
    results[3] = msgspec.structs.replace(results[3], settings={**results[3].settings, "cache_bits": 8})
    first = (
        "users 1",
        "mean response (s)",
        "1.21 ±5%",
        "0.85 ±5%",
        "-30.0%  ▲ better",
        "TTFT mean (ms)",
        "90.0",
        "≈ same",
    )
    last = "users 4", "response p99 (ms)", "2,268.0 ±5%", "± is half the range", "cache_bits  - → 8", "d Differences"
    assert shows(link_app, *first, *last, terminal_size=(120, 40), run_before=compared)
