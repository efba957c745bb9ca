"""An idle console: how often frames are drawn, and how many rows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widget import Widget

from console.tui.app import EricApp
from console.tui.screens.base import AppScreen
from console.tui.screens.dashboard.panels import RowsPanel
from console.tui.screens.dashboard.panels.session import SessionPanel
from console.tui.widgets.graph import Graph, Plot
from console.tui.widgets.status_line import StatusLine
from engine.snapshot import Second, Snapshot
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text

HZ = 2
SIZE = (140, 44)


def idle(seconds: float = 0.0, **changes: Any) -> Snapshot:
    """An engine that has done nothing for ten minutes, so many seconds later; the processor's load goes on."""
    at = scenes.NOW + seconds
    past = [
        Second(at=at - back, device_utilisation=(_load(at - back),), device_memory=(0.4,), limit="none")
        for back in reversed(range(600))
    ]
    quiet = scenes.cpu_idle(history=tuple(past), marks=(), requests=(), running=0, queued=0, uptime_s=at % 10_000)
    devices = [msgspec.structs.replace(each, utilisation=_load(at)) for each in quiet.devices]
    return msgspec.structs.replace(quiet, at=at, devices=tuple(devices), **changes)


def _load(at: float) -> float:
    return 0.02 + at % 5 / 100


class Drawn:
    """Counts frames, and rows that are made for them, by kind of widget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        for owner, name in ((AppScreen, "draw"), (AppScreen, "draw_header")):
            self._count(monkeypatch, owner, name)
        for widget in (Plot, RowsPanel):
            self._count_rows(monkeypatch, widget)
        whole = Widget._render_content

        def render_content(widget: Widget) -> None:
            self.rows[type(widget).__name__] += widget.size.height
            whole(widget)

        monkeypatch.setattr(Widget, "_render_content", render_content)

    def clear(self) -> None:
        """Count from here."""
        self.frames.clear()
        self.rows.clear()

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def counted(screen: Any, *arguments: Any) -> Any:
            self.frames[name] += 1
            return call(screen, *arguments)

        monkeypatch.setattr(owner, name, counted)

    def _count_rows(self, monkeypatch: pytest.MonkeyPatch, owner: type[Plot] | type[RowsPanel]) -> None:
        call: Callable[..., Strip] = owner.render_line

        def counted(widget: Any, y: int) -> Strip:
            self.rows[type(widget).__name__] += 1
            return call(widget, y)

        monkeypatch.setattr(owner, "render_line", counted)


async def pass_seconds(pilot: Pilot[None], link: FakeLink, since: int, until: int, **changes: Any) -> None:
    """Have the app look HZ times a second at an engine that publishes once a second."""
    assert isinstance(pilot.app, EricApp)
    for second in range(since, until):
        link.show(idle(second, **changes))
        for _ in range(HZ):
            pilot.app._tick()
            await pilot.pause()


async def quiet_app(pilot: Pilot[None], link: FakeLink) -> None:
    """The app without its own clock, and with nothing left to draw."""
    assert isinstance(pilot.app, EricApp)
    pilot.app._clock.stop()
    await pass_seconds(pilot, link, 0, 4)


async def test_an_idle_dashboard_draws_every_other_second_and_its_clock_each(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink(idle())
    drawn = Drawn(monkeypatch)
    async with EricApp(link, refresh_hz=HZ).run_test(size=SIZE) as pilot:
        await quiet_app(pilot, link)
        drawn.clear()
        await pass_seconds(pilot, link, 4, 24)
        assert drawn.frames["draw"] == 10
        assert drawn.frames["draw_header"] == 20
        assert drawn.rows[StatusLine.__name__] == 20
        assert "14:02:34" in screen_text(pilot.app)


async def test_an_idle_dashboard_makes_the_rows_again_that_changed_and_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = FakeLink(idle())
    drawn = Drawn(monkeypatch)
    async with EricApp(link, refresh_hz=HZ).run_test(size=SIZE) as pilot:
        await quiet_app(pilot, link)
        assert pilot.app.query(Graph)
        drawn.clear()
        await pass_seconds(pilot, link, 4, 24)
        assert drawn.rows.pop(SessionPanel.__name__) == 10  # since when it is up
        assert drawn.rows.pop("DevicesPanel") <= 2 * 10  # load and memory, with what they were
        assert drawn.rows.pop(StatusLine.__name__) == 20
        assert not drawn.rows


@pytest.mark.parametrize(
    "changes",
    [{"queued": 1}, {"running": 1}, {"target_workers": 3}, {"draining_since": scenes.NOW}, {"log_total": 10**6}],
    ids=str,
)
async def test_a_change_of_an_idle_engine_is_drawn_at_the_next_look(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink(idle())
    drawn = Drawn(monkeypatch)
    async with EricApp(link, refresh_hz=HZ).run_test(size=SIZE) as pilot:
        await quiet_app(pilot, link)
        drawn.clear()
        assert isinstance(pilot.app, EricApp)
        link.show(idle(3, **changes))  # of a second that is on the screen
        pilot.app._tick()
        assert drawn.frames["draw"] == 1


async def test_text_of_a_panel_of_rows_is_selected_where_the_mouse_is() -> None:
    async with EricApp(FakeLink(idle())).run_test(size=SIZE) as pilot:
        panel = pilot.app.screen.query_one(SessionPanel)
        region = panel.content_region
        await pilot.mouse_down(offset=(region.x, region.y + 1))
        await pilot.hover(offset=(region.x + 6, region.y + 1))
        await pilot.mouse_up(offset=(region.x + 6, region.y + 1))
        assert pilot.app.screen.get_selected_text() == "errors "
