"""The palette begins with common commands; the footer with the main thing; both, and help, with what works here."""

from __future__ import annotations

import pytest

from console.link.tuning import TuningReport
from console.tui.app import EricApp
from console.tui.commands import ThemeCommands, palette_entries
from console.tui.screens.help import HelpScreen
from console.tui.screens.models.table import ModelTable
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.widgets.table import Table
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import choose, listed, rows, screen_text, toasts, until

PRIMARY = {
    "dashboard": "⏎ Open",
    "models": "⏎ Load",
    "chat": "⏎ Send",
    "requests": "⏎ Open",
    "tune": "f Autotune",
    "api": "a API",
    "logs": "/ Find",
    "settings": "⏎ Edit",
}


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
@pytest.mark.parametrize("mode", PRIMARY)
async def test_the_footer_begins_with_the_main_thing(mode: str, size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(scenes.busy()), start=mode)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: rows(app)[-1].startswith(f" {PRIMARY[mode]} "))


async def test_the_palette_begins_with_common_commands_in_order_of_use() -> None:
    app = EricApp(FakeLink(scenes.busy()), start="logs")
    async with app.run_test() as pilot:
        await pilot.pause()
        titles = [entry.title for entry in palette_entries(app.screen)]
        assert titles[:4] == [
            "Load a model…",
            "Unload a model…",
            "Restart a worker…",
            "Switch the HTTP API on or off",
        ]
        assert [title for title in titles if "ench" in title] == ["Benchmark…"]
        assert len(titles) == len(set(titles))


async def test_a_screen_that_does_what_a_command_does_has_its_own_words_in_its_place() -> None:
    app = EricApp(FakeLink(scenes.busy()), start="models")
    async with app.run_test() as pilot:
        await listed(pilot)
        first = next(iter(palette_entries(app.screen)))
        assert (first.title, first.keys) == ("Load the selected model, replacing the first", "⏎ or l")


async def test_the_palette_goes_to_where_a_worker_is_chosen() -> None:
    app = EricApp(FakeLink(scenes.busy()), start="logs")
    async with app.run_test() as pilot:
        await pilot.pause()
        await choose(app, "Restart a worker…")
        await until(pilot, lambda: app.focused is not None and app.focused.id == "worker-table")
        assert app.current_mode == "dashboard"
        assert isinstance(app.focused, Table)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, WorkerScreen))


async def test_the_themes_of_textual_are_found_by_name_and_not_listed() -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(100, 40)) as pilot:
        own = [hit.text or "" async for hit in ThemeCommands(app.screen).discover()]
        assert len(own) >= 4
        assert all(name.startswith("ericllm-") for name in own)
        assert [hit.text async for hit in ThemeCommands(app.screen).search("dracula")] == ["dracula"]
        await choose(app, "Theme…")
        await until(pilot, lambda: own[0] in screen_text(app))
        await pilot.press(*"ericllm-light")
        await until(pilot, lambda: own[0] not in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.theme == "ericllm-light")


async def test_a_model_that_cannot_be_loaded_offers_no_load_and_the_panel_says_why() -> None:
    link = FakeLink(scenes.cpu_idle())
    app = EricApp(link, start="models")
    async with app.run_test(size=(160, 48), notifications=True) as pilot:
        table = await listed(pilot)
        await until(pilot, lambda: "⏎ Load" in rows(app)[-1])
        broken = next(at for at, row in enumerate(table.rows) if row.key == _broken(table))
        table.move_to(broken)
        await until(pilot, lambda: "Load" not in rows(app)[-1])
        assert "Beside" not in rows(app)[-1]
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert "Load the selected model" not in screen_text(app)
        await pilot.press("escape", "enter")
        await until(pilot, lambda: "✖ the weights are pickles; only safetensors" in screen_text(app))
        await pilot.app.workers.wait_for_complete()
        assert (link.commands, toasts(app)) == ([], [])


def _broken(table: ModelTable) -> str:
    """The name of the first model that cannot be loaded."""
    entries = (table.entry(row.key) for row in table.rows)
    return next(entry.name for entry in entries if entry is not None and entry.problem)


@pytest.mark.parametrize(("size", "columns"), [((80, 24), 80), ((160, 48), 80)])
async def test_the_palette_is_80_columns_wide_and_in_the_middle(size: tuple[int, int], columns: int) -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=size) as pilot:
        await pilot.press("ctrl+p")
        await until(pilot, lambda: "Load a model…" in screen_text(app))
        line = next(row for row in rows(app) if "▔" in row)
        assert line.count("▔") == columns
        assert line.index("▔") == (size[0] - columns) // 2


async def test_help_is_filtered_by_words() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(100, 40)) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("slash", *"first token")
        await until(pilot, lambda: "Add a worker" not in screen_text(app) and "time to first token" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))


@pytest.mark.parametrize("size", [(80, 24), (100, 30)])
async def test_the_footer_of_tune_has_the_sample_load_and_benchmarks_and_nothing_that_cannot_be_used(
    size: tuple[int, int],
) -> None:
    app = EricApp(FakeLink(scenes.busy()), start="tune")
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: rows(app)[-1].startswith(" f Autotune  s Sample load  b Benchmarks  v View "))
        for label in ("Apply best", "Undo"):
            assert label not in rows(app)[-1]


async def test_a_key_of_a_run_is_named_by_what_it_does_now() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="tune")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "s Sample load" in rows(app)[-1])
        link.script["tuning.report"] = TuningReport(load_clients=32, load_left_s=20.0)
        await until(pilot, lambda: "s Stop load" in rows(app)[-1])
        link.script["tuning.report"] = TuningReport(state="running")
        await until(pilot, lambda: "f Stop autotune" in rows(app)[-1])
        assert "s Sample load" not in rows(app)[-1]


@pytest.mark.parametrize(
    ("mode", "labels"),
    [
        ("dashboard", ("Open", "Cancel", "Worker", "Workers", "Max prompts")),
        ("requests", ("Open", "Cancel", "All queued")),
        ("models", ("Unload",)),
        ("tune", ("Autotune", "Sample load", "Apply best", "Undo", "Workers")),
    ],
)
async def test_without_a_model_and_requests_nothing_is_offered_that_needs_one(
    mode: str, labels: tuple[str, ...]
) -> None:
    app = EricApp(FakeLink(scenes.empty()), start=mode)
    async with app.run_test(size=(220, 60)) as pilot:
        await until(pilot, lambda: "q Quit" in rows(app)[-1])
        await pilot.pause()
        words = rows(app)[-1].split("  ")
        assert [label for label in labels if any(word.endswith(f" {label}") for word in words)] == []


async def test_a_request_is_cancelled_by_a_key_that_appears_when_it_is_selected() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "⏎ Open" in rows(app)[-1])
        assert "x Cancel" not in rows(app)[-1]
        await pilot.press("down")
        await until(pilot, lambda: "x Cancel" in rows(app)[-1])


async def test_a_key_is_revoked_where_there_is_one_that_can_be() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="api")
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "x Revoke" in rows(app)[-1])
        link.api.change_report(keys=())
        await until(pilot, lambda: "x Revoke" not in rows(app)[-1])


async def test_without_results_no_key_of_results_is_offered() -> None:
    app = EricApp(FakeLink(scenes.busy()), start="tune")
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("b")
        await until(pilot, lambda: "n New" in rows(app)[-1])
        await pilot.pause()
        for label in ("Plot", "Over time", "Mark", "Compare", "Delete"):
            assert label not in rows(app)[-1]


async def test_help_leaves_out_what_does_nothing_here_and_now() -> None:
    app = EricApp(FakeLink(scenes.cpu_idle()))
    async with app.run_test(size=(120, 70)) as pilot:
        await pilot.press("question_mark")
        await until(pilot, lambda: "What the numbers mean" in screen_text(app))
        shown = screen_text(app)
        assert "Apply the advice" not in shown
        assert "Switch to the next loaded model" not in shown
        assert [title for title in ("This panel", "This screen", "Everywhere") if title in shown] == [
            "This panel",
            "This screen",
            "Everywhere",
        ]
