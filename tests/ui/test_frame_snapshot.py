"""One frame reads the engine once, and every screen draws what it was given."""

from __future__ import annotations

import msgspec
import pytest

from console.tui.app import EricApp
from console.tui.attached_app import AttachedApp
from console.tui.modes import MODES
from engine.snapshot import Snapshot
from tests.fakes import scenes
from tests.fakes.elsewhere import FakeRemote
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text, until

COVERS = ["action_help", "action_doctor", "action_autotune"]


class CountingLink(FakeLink):
    """Every snapshot is another one: it has as many requests in its queue as were read before it."""

    def __init__(self) -> None:
        super().__init__(scenes.busy())
        self.count = 0

    def snapshot(self) -> Snapshot:
        self.count += 1
        return msgspec.structs.replace(self.current, queued=self.count)


@pytest.mark.parametrize("mode", [mode.name for mode in MODES])
async def test_a_frame_of_a_screen_reads_the_engine_once(mode: str) -> None:
    link = CountingLink()
    app = EricApp(link, start=mode)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.screen.is_mounted and app.current_mode == mode)
        await pilot.pause()
        before = link.count
        app.refresh_screen()
        assert link.count == before + 1


@pytest.mark.parametrize("cover", COVERS)
async def test_a_frame_of_what_covers_a_screen_reads_the_engine_once(cover: str) -> None:
    link = CountingLink()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        getattr(app, cover)()
        await until(pilot, lambda: len(app.screen_stack) == 2 and app.screen.is_mounted)
        before = link.count
        app.refresh_screen()
        assert link.count == before + 1


async def test_all_of_a_screen_is_of_one_snapshot() -> None:
    link = CountingLink()
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        drawn, text = None, ""
        while drawn is not app.view.published:  # the console's own next frame may come between
            app.refresh_screen()
            drawn = app.view.published
            await pilot.pause(0)
            text = screen_text(app)
        assert f"{drawn.running} running, {drawn.queued} queued" in text
        assert text.count(f"queued {drawn.queued}") == 1


async def test_a_frame_reads_each_instance_once() -> None:
    links = [FakeRemote("10.0.0.7:8000"), FakeRemote("10.0.0.8:8000")]
    counts = {link.stands.name: 0 for link in links}

    def count(link: FakeRemote) -> Snapshot:
        counts[link.stands.name] += 1
        return link.current

    for link in links:
        link.snapshot = lambda link=link: count(link)  # type: ignore[method-assign, misc]
    app = AttachedApp(links)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app.action_instances()
        await until(pilot, lambda: len(app.screen_stack) == 2 and app.screen.is_mounted)
        before = dict(counts)
        app.refresh_screen()
        assert counts == {name: number + 1 for name, number in before.items()}
