"""A panel of the dashboard is one file, found by itself; and no widget opens a screen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from textual.color import Color
from textual.dom import DOMNode
from textual.renderables.digits import Digits as DigitsLook
from textual.screen import Screen
from textual.widgets import Digits, Static

from console.tui.app import EricApp
from console.tui.binding_index import _modules
from console.tui.screens.dashboard import panels
from console.tui.screens.dashboard.panels.throughput import Stat
from console.tui.widgets.latency import advice_line
from engine.requests.causes import Why, describe
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


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (160, 48)])
async def test_a_p95_gives_up_its_slo_rather_than_being_cut(size: tuple[int, int]) -> None:
    slo = msgspec.structs.replace(scenes.busy().insight.goodput, slo_ttft_s=0.5, slo_itl_s=0.05)
    snapshot = scenes.busy(insight=msgspec.structs.replace(scenes.busy().insight, goodput=slo))
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.pause()
        for stat in app.screen.query(Stat):
            detail = stat.query_one(".detail", Static)
            assert not stat.display or detail.size.width == 0 or cell_len(str(detail.content)) <= detail.size.width


@pytest.mark.parametrize("size", [(100, 30), (120, 40), (160, 48), (220, 60)])
@pytest.mark.parametrize("per_s", [9.0, 987.0, 2175.0, 98_765.0])
async def test_no_big_number_is_cut(size: tuple[int, int], per_s: float) -> None:
    app = EricApp(FakeLink(scenes.busy(output_tokens_per_s=per_s)))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.pause()
        shown = [stat for stat in app.screen.query(Stat) if stat.size.width]
        assert size[0] == 100 or shown
        for stat in shown:
            digits = stat.query_one(Digits)
            assert DigitsLook.get_width(digits.value) <= digits.size.width
            caption = stat.query_one(".caption", Static)
            assert cell_len(str(caption.content)) <= caption.size.width


def test_what_to_change_comes_before_the_cause() -> None:
    why = Why(
        total_s=100.0, causes={"lost_worker": 6.0, "decode": 94.0}, sentence="6% lost: see the log for the cause."
    )
    assert advice_line(why) == "see the log for the cause (6% lost worker)"


@pytest.mark.parametrize("size", [(100, 30), (160, 48)])
async def test_the_cause_under_the_mouse_is_named_in_the_frame_of_session(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(scenes.busy(why=describe({"slot": 3.0, "decode": 1.0}))))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        session = app.screen.query_one("#session")
        y = next(y for y, row in enumerate(rows(app)) if "time  " in row and "━" in row.partition("time")[2])
        await pilot.hover(offset=(rows(app)[y].index("...", rows(app)[y].index("time")), y))
        assert str(session.border_subtitle) == "waiting for a slot 3.00 s (75%)"
        await pilot.hover("#request-table")
        assert not session.border_subtitle
