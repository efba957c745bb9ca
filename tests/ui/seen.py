"""What a person sees: the text on the screen."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from textual.app import App
from textual.notifications import SeverityLevel
from textual.pilot import Pilot
from textual.widgets import Static

from console.tui.commands import BindingCommands
from console.tui.screens.models.panel import FitPreview, ModelDetails
from console.tui.screens.models.table import ModelTable
from tests.fakes.link import MODELS
from tests.ui.idling import PATIENCE_S


def rows(app: App[Any]) -> list[str]:
    """The rows of the screen as plain text, blank where nothing was drawn yet."""
    width, height = app.size
    lines = app.screen._compositor.render_strips(app.size) if (width and height) else []
    return ["".join(segment.text for segment in strip) for strip in lines] or [""] * height


def screen_text(app: App[Any]) -> str:
    """All of it."""
    return "\n".join(rows(app))


def toasts(app: App[Any], severity: SeverityLevel | None = None) -> list[str]:
    """What the toasts shown now say, oldest first; of one severity, or of all."""
    return [each.message for each in app._notifications if severity in (None, each.severity)]


async def until(pilot: Pilot[None], met: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Let the app go on until something is the case. Fails with the screen as it was when patience ended."""
    try:
        async with asyncio.timeout(patience_s):
            while not met():
                await pilot.pause(0.01)
    except TimeoutError:
        raise AssertionError(f"focused: {pilot.app.focused!r}\n{screen_text(pilot.app)}") from None


async def listed(pilot: Pilot[None]) -> ModelTable:
    """The table of the Models screen, once its rows are there."""
    await until(pilot, lambda: bool(pilot.app.screen.query(ModelTable)))
    table = pilot.app.screen.query_one(ModelTable)
    await until(pilot, lambda: len(table.rows) == len(MODELS))
    return table


def selected(pilot: Pilot[None]) -> str:
    """What is said of the selected model, and of a load of it."""
    screen = pilot.app.screen
    brief = screen.query_one("#brief", Static)
    return "\n".join(
        map(str, (brief.content, screen.query_one(ModelDetails).content, screen.query_one(FitPreview).content))
    )


def cells(table: ModelTable, name: str) -> list[str]:
    """A row of it as words, without the blanks around them."""
    row = next(row for row in table.rows if row.key == name)
    return ["".join(text for text, _ in cell).strip() for cell in row.cells]


async def foretold(pilot: Pilot[None]) -> None:
    """The Models screen, once it says whether the selected model fits."""
    await listed(pilot)
    await until(pilot, lambda: "fit" in selected(pilot).lower())


def shows(
    app: App[Any],
    *words: str,
    terminal_size: tuple[int, int],
    press: Sequence[str] = (),
    run_before: Callable[[Pilot[None]], Awaitable[None]] | None = None,
) -> bool:
    """Run an app as `snap_compare` does, and wait until the words are on the screen, in the order of reading."""

    def found() -> bool:
        text, at = screen_text(app), 0
        for word in words:
            if (at := text.find(word, at)) < 0:
                return False
            at += len(word)
        return True

    async def run() -> None:
        async with app.run_test(size=terminal_size) as pilot:
            if run_before is not None:
                await run_before(pilot)
            await pilot.press(*press)
            await until(pilot, found)

    asyncio.run(run())
    return True


async def choose(app: App[Any], title: str) -> None:
    """Run a command as the palette does."""
    hits = {hit.text: hit async for hit in BindingCommands(app.screen).discover()}
    done = hits[title].command()
    if inspect.isawaitable(done):
        await done
