"""A panel draws what changed in it, and nothing where nothing did."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.content import Content
from textual.geometry import Region
from textual.widget import Widget

from console.tui.widgets.panel import after_layout, refresh_rows, set_subtitle, set_title


class Panel(Widget):
    """Keeps what it was told to draw."""

    drawn: list[tuple[tuple[Region, ...], bool]]

    def refresh(self, *regions: Region, layout: bool = False, **options: Any) -> Panel:
        """Written down."""
        self.__dict__.setdefault("drawn", []).append((regions, layout))
        return super().refresh(*regions, layout=layout, **options)


class PanelApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Panel()


async def test_a_panel_is_drawn_once_it_has_its_size_but_not_while_the_console_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    async with PanelApp().run_test(size=(40, 10)) as pilot:
        panel = pilot.app.query_one(Panel)
        after_layout(panel, lambda: drawn.append(1))
        await pilot.pause()
        assert drawn == [1]
        monkeypatch.setattr(PanelApp, "is_running", False)
        asked = asyncio.Event()
        after_layout(panel, lambda: drawn.append(2))
        panel.call_after_refresh(asked.set)
        await asked.wait()
        assert drawn == [1]
        monkeypatch.undo()


@pytest.mark.parametrize("say", [set_title, set_subtitle])
async def test_a_title_that_is_the_same_draws_nothing(say: Any) -> None:
    async with PanelApp().run_test(size=(40, 10)) as pilot:
        panel = pilot.app.query_one(Panel)
        for words in ("3 of [4]", Content.assemble(("3", "bold"), " of 4")):
            panel.drawn.clear()
            say(panel, words)
            assert len(panel.drawn) == 1
            say(panel, words)
            assert len(panel.drawn) == 1


async def test_a_string_is_no_markup() -> None:
    async with PanelApp().run_test(size=(40, 10)) as pilot:
        panel = pilot.app.query_one(Panel)
        set_title(panel, "[bold]one")
        assert panel._border_title is not None  # the only place that has it as it is shown
        assert panel._border_title.plain == "[bold]one"


async def test_rows_that_changed_are_drawn_and_no_others() -> None:
    async with PanelApp().run_test(size=(40, 10)) as pilot:
        panel = pilot.app.query_one(Panel)
        before = [Content("a"), Content.assemble(("b", "bold")), Content("c")]
        panel.drawn.clear()
        refresh_rows(panel, before, [Content("a"), Content("b"), Content("d")])
        assert panel.drawn == [((Region(0, 1, 40, 1), Region(0, 2, 40, 1)), False)]
        panel.drawn.clear()
        refresh_rows(panel, before, list(before))
        assert panel.drawn == []
        refresh_rows(panel, before, before[:2])
        assert panel.drawn == [((), True)]
