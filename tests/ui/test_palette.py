"""The palette begins with common commands; the footer with the main thing; both, and help, with what works here."""

from __future__ import annotations

import pytest

from console.tui.app import EricApp
from console.tui.commands import ThemeCommands, palette_entries
from console.tui.screens.help import HelpScreen
from console.tui.screens.models.table import ModelTable
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.widgets.table import Table
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import choose, listed, rows, screen_text, until

PRIMARY = {
    "dashboard": "⏎ Open",
    "models": "⏎ Load",
    "chat": "⏎ Send",
    "requests": "⏎ Open",
    "tune": "f Find best",
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


async def test_the_programs_own_themes_come_before_the_others() -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(100, 40)) as pilot:
        names = [hit.text or "" async for hit in ThemeCommands(app.screen).discover()]
        own = [name for name in names if name.startswith("ericllm-")]
        assert len(own) >= 4
        assert names[: len(own)] == own
        await choose(app, "Theme…")
        await until(pilot, lambda: own[0] in screen_text(app))
        await pilot.press(*"ericllm-light")
        await until(pilot, lambda: own[0] not in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.theme == "ericllm-light")


async def test_a_model_that_cannot_be_loaded_offers_no_load_and_enter_says_why() -> None:
    app = EricApp(FakeLink(scenes.cpu_idle()), start="models")
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
        await until(pilot, lambda: any(_broken(table) in toast.message for toast in app._notifications))


def _broken(table: ModelTable) -> str:
    """The name of the first model that cannot be loaded."""
    entries = (table.entry(row.key) for row in table.rows)
    return next(entry.name for entry in entries if entry is not None and entry.problem)


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
