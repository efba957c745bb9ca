"""A bench run from a screen: chosen in a form, seen as it grows, cancelled; what is refused."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from console.bench.kinds import PLANS
from console.link.benches import BenchOrder, BenchReport
from console.link.readonly import ReadOnlyLink
from console.link.rpc import as_link
from console.tui.app import EricApp
from console.tui.commands import palette_entries
from console.tui.widgets.table import Table
from engine.errors import EngineBusy, InvalidRequest
from tests.fakes import bench_scenes, tune_scenes
from tests.fakes.link import FakeLink
from tests.ui.benching import SIZES, app_with, formed, link_of, opened, shown
from tests.ui.seen import choose, screen_text, shows, until

pytestmark = pytest.mark.long

# -- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_the_form_says_what_is_measured_and_that_others_share_the_engine(size: tuple[int, int]) -> None:
    app = app_with()
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("down")
        await shown(pilot, "Mean response time by number of users")
        text = " ".join(screen_text(app).split())
        for words in (
            *PLANS,
            "numbers of users",
            "1,2,4",
            "Runs on the serving engine",
            "Start (enter)",
        ):
            assert words in text, words


async def test_enter_runs_the_bench_with_what_was_typed() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("down")
        await shown(pilot, "Mean response time by number of users")
        await pilot.press("tab", *"1,8", "enter")
        settings = {"users": "1,8", "requests": "4", "repeats": "1"}
        order = BenchOrder(bench="users", settings=settings)
        await until(pilot, lambda: link_of(app).commands == [("start", {"order": order})])
        await shown(pilot, "measuring users")


async def test_ctrl_t_fills_in_the_bench_as_it_is_on_the_command_line() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("down", "ctrl+t")
        await shown(pilot, "1,2,3,5,7,9")
        await pilot.press("enter")
        await until(pilot, lambda: [each["order"].quick for _, each in link_of(app).commands] == [False])


async def test_a_refusal_is_said_in_the_form_at_the_field() -> None:
    app = app_with()
    link_of(app).failures["start"] = InvalidRequest("users must be 1 or more", param="users")
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("down", "enter")
        await shown(pilot, "✖ Users must be 1 or more")
        assert app.focused is not None
        assert app.focused.id == "field-0"


async def test_a_bench_that_cannot_be_run_here_says_why_and_is_not_asked_for() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("end", "enter")
        await shown(pilot, "✖ This benchmark unloads the model")
        assert link_of(app).names() == []


@pytest.mark.parametrize("size", SIZES)
async def test_the_table_grows_while_it_runs(size: tuple[int, int]) -> None:
    app = app_with(bench_scenes.running(rows=1))
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await shown(pilot, "users 4 · 621 of 1,344 · repeat 2 of 3")
        await shown(pilot, "46% about 1 min 55 s left")
        table = app.screen.query_one("#bench-rows", Table)
        assert len(table.rows) == 1
        link_of(app).script["benches.report"] = bench_scenes.running(rows=2)
        app.refresh_screen()
        await until(pilot, lambda: len(table.rows) == 2)
        await shown(pilot, "1.34 ±8%")


async def test_c_cancels_and_says_what_is_kept() -> None:
    app = app_with(bench_scenes.running())
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "measuring users")
        await pilot.press("c")
        await shown(pilot, "users: Cancelled: what was measured by then is saved as #3.")
        assert link_of(app).names() == ["cancel"]


async def test_a_bench_goes_on_while_others_screens_are_looked_at() -> None:
    app = app_with(bench_scenes.running())
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("escape")
        await shown(pilot, "benchmark users 46%, 1 min 55 s left; b shows it")
        assert link_of(app).names() == []


async def test_when_it_ends_its_result_is_selected() -> None:
    app = app_with(bench_scenes.running())
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "measuring users")
        link_of(app).benches.results[5] = bench_scenes.grid()
        done = BenchReport(state="done", bench="grid", outcome="1,148.0 tok/s; saved as #5.", number=5)
        link_of(app).script["benches.report"] = done
        app.refresh_screen()
        await shown(pilot, "✓ grid: 1,148.0 tok/s; saved as #5.")
        await shown(pilot, "output (tok/s)")
        assert "measuring" not in screen_text(app)


async def test_the_palette_has_one_command_for_all_benches() -> None:
    app = app_with()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "Tune" in screen_text(app))
        (title,) = [entry.title for entry in palette_entries(app.screen) if "Bench" in entry.title]
        await choose(app, title)
        await shown(pilot, "Benchmark results")


async def test_a_console_that_takes_no_orders_shows_results_and_offers_no_bench() -> None:
    link = FakeLink(tune_scenes.tuned())
    link.benches.results = bench_scenes.results()
    app = EricApp(as_link(ReadOnlyLink(link)), start="tune")
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await shown(pilot, "1.13 s mean response, users 4")
        await pilot.press("space", "down")
        await until(pilot, lambda: "C Compare" in screen_text(app).splitlines()[-1])
        keys = screen_text(app).splitlines()[-1]
        assert "n New" not in keys
        assert "d Delete" not in keys
        await pilot.press("escape")
        titles = {entry.title for entry in palette_entries(app.screen)}
        assert "Autotune…" not in titles


async def test_another_that_goes_on_is_said() -> None:
    app = app_with()
    link_of(app).failures["start"] = EngineBusy("Benchmark users is already running. Cancel it first")
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await formed(pilot)
        await pilot.press("enter")
        await shown(pilot, "✖ Benchmark users is already running. Cancel it first")


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_a_bench_under_way_is_above_the_results_on_a_small_terminal() -> None:
    async def measuring(pilot: Pilot[None]) -> None:
        await opened(pilot)
        await shown(pilot, "1.34 ±8%")

    now = "Running", "◔ measuring users  ·  users 4  ·  621 of 1,344", "mean response (s)", "1.21 ±5%", "1.34 ±8%"
    results = (
        "Benchmark results",
        "1.34 s mean response, users 2",
        "1,148.0 tok/s output",
        "1.62 s mean response",
        "c Cancel",
    )
    assert shows(app_with(bench_scenes.running()), *now, *results, terminal_size=(80, 24), run_before=measuring)
