"""Part of a screen is drawn from the widgets in its rows, and looks as if all of it were drawn."""

from __future__ import annotations

import pytest
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.widget import Widget

from console.tui.app import EricApp
from console.tui.widgets.graph import Graph
from console.tui.widgets.status_line import StatusLine
from tests.fakes import scenes
from tests.fakes.link import FakeLink


def change(compositor: Compositor, widgets: set[Widget]) -> None:
    """Have these widgets drawn with the next update, and no others."""
    for widget in widgets:
        widget.refresh()
    compositor._dirty_regions.clear()
    compositor.update_widgets(widgets)


async def test_a_clock_draws_no_widget_in_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        drawn: set[Widget] = set()
        render_lines = Widget.render_lines

        def recorded(widget: Widget, crop: Region) -> object:
            drawn.add(widget)
            return render_lines(widget, crop)

        compositor = app.screen._compositor
        change(compositor, {app.screen.query_one(StatusLine)})
        monkeypatch.setattr(Widget, "render_lines", recorded)
        assert compositor.render_update() is not None
        assert drawn == {app.screen, app.screen.query_one(StatusLine)}


@pytest.mark.parametrize("changed", ["StatusLine", "#session", "#tokens", "StatusLine, #kv, #workers"])
async def test_part_of_a_screen_looks_as_if_all_of_it_were_drawn(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        compositor = app.screen._compositor
        assert app.screen.query(Graph)
        texts = []
        for _ in range(2):
            change(compositor, set(app.screen.query(changed)))
            update = compositor.render_update()
            assert isinstance(update, ChopsUpdate)
            texts.append(update.render_segments(app.console))
            monkeypatch.setattr(type(compositor), "render_partial_update", Compositor.render_partial_update)
        assert len(texts[0]) > 80
        assert texts[0] == texts[1]
