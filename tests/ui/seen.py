"""What a person sees: the text on the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot

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


async def until(pilot: Pilot[None], met: Callable[[], bool]) -> None:
    """Let the app go on until something is the case. Fails with the screen as it was when patience ended."""
    try:
        async with asyncio.timeout(PATIENCE_S):
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
    return f"{screen.query_one(ModelDetails).content}\n{screen.query_one(FitPreview).content}"


def cells(table: ModelTable, name: str) -> list[str]:
    """A row of it as words, without the blanks around them."""
    row = next(row for row in table.rows if row.key == name)
    return ["".join(text for text, _ in cell).strip() for cell in row.cells]


async def foretold(pilot: Pilot[None]) -> None:
    """The Models screen, once it says whether the selected model fits."""
    await listed(pilot)
    await until(pilot, lambda: "fit" in selected(pilot))
