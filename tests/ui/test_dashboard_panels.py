"""A panel of the dashboard is one file, found by itself; and no widget opens a screen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from textual.color import Color
from textual.dom import DOMNode
from textual.screen import Screen

from console.tui.app import EricApp
from console.tui.binding_index import _modules
from console.tui.screens.dashboard import panels
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, until

PANEL = '''"""Queue: how many requests wait."""

from textual.content import Content

from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.view import View


class QueuePanel(DashboardPanel):
    """How many requests wait."""

    NAME = "waiting"
    TITLE = "Waiting"
    PLACE = "{place}"

    DEFAULT_CSS = """
    QueuePanel {{ height: 3; color: $warning; }}
    """

    _waiting = 0

    def show(self, view: View) -> None:
        """Draw the number, where it changed."""
        if view.snapshot.queued != self._waiting:
            self._waiting = view.snapshot.queued
            self.refresh()

    def render(self) -> Content:
        """One line."""
        return Content(f"{{self._waiting}} in the line")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is looked through for panels, too."""
    monkeypatch.setattr(panels, "__path__", [*panels.__path__, str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(f"{panels.__name__}."):
            del sys.modules[name]


@pytest.mark.parametrize("place", ["top", "left", "right", "bottom"])
@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_a_file_is_a_panel_of_the_dashboard(folder: Path, place: str, size: tuple[int, int]) -> None:
    (folder / "waiting.py").write_text(PANEL.format(place=place))
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "in the line" in screen_text(app))
        assert any("Waiting" in row for row in rows(app))
        panel = app.screen.query_one("#waiting")
        assert panel.outer_size.height == 3
        assert panel.styles.color == Color.parse(app.theme_variables["warning"])
        link.show(msgspec.structs.replace(scenes.busy(), queued=77))
        await until(pilot, lambda: "77 in the line" in screen_text(app))


def test_the_panels_of_a_place_have_an_order_of_their_own() -> None:
    found = [(panel.PLACE, panel.NAME) for panel in panels.discover()]
    for place, names in {
        "top": ["many-devices"],
        "left": ["devices", "workers", "session"],
        "right": ["throughput"],
        "bottom": ["requests-panel", "advice"],
    }.items():
        assert [name for at, name in found if at == place] == names


def test_no_widget_opens_a_screen_but_the_views_of_tune_that_have_keys_of_their_own() -> None:
    widgets = {
        each
        for module in _modules("console.tui.screens", "console.tui.widgets")
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, DOMNode) and not issubclass(each, Screen)
        if each.__module__ == module.__name__
    }
    opening = {each.__name__ for each in widgets if "push_screen" in inspect.getsource(each)}
    assert opening == {"BenchesPanel", "WorkloadPanel"}
