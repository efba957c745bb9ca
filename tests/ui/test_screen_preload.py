"""Screens that are made before anybody opens them are those that a key would have made."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from console.tui import modes
from console.tui.app import EricApp
from tests.fakes.link import FakeLink
from tests.ui.seen import foretold, screen_text, until

pytestmark = pytest.mark.long

NAMES = [mode.name for mode in modes.MODES]


async def made(pilot: Pilot[None]) -> None:
    """Have all screens made."""
    app = pilot.app
    assert isinstance(app, EricApp)
    app.make_screens_ahead()
    await until(pilot, lambda: set(NAMES) <= app._screen_stacks.keys())
    await pilot.pause()


async def test_screens_are_made_and_none_of_them_is_shown() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        await pilot.pause()
        before, focused = screen_text(app), app.focused
        await made(pilot)
        assert (app.current_mode, app.focused) == ("dashboard", focused)
        assert screen_text(app) == before


async def pictures(*, ahead: bool) -> dict[str, tuple[str, str | None]]:
    """What each screen shows, and where its focus is."""
    app, seen = EricApp(FakeLink()), {}
    async with app.run_test(size=(100, 30)) as pilot:
        if ahead:
            await made(pilot)
        for mode in modes.MODES:
            await pilot.press(f"f{mode.digit}")
            if mode.name == "models":
                await foretold(pilot)
            told = "of 8,192 tokens" if mode.name == "chat" else ""
            await until(pilot, lambda: not app._batch_count and told in screen_text(app))  # noqa: B023 - called here
            await pilot.pause(0.1)
            seen[mode.name] = screen_text(app), app.focused.id if app.focused else None
    return seen


async def test_a_screen_looks_as_one_that_a_key_made() -> None:
    by_key, by_itself = await pictures(ahead=False), await pictures(ahead=True)
    for name in NAMES:
        assert by_itself[name] == by_key[name]


async def test_a_screen_that_was_opened_meanwhile_is_made_once() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        await pilot.press("f5")
        opened = app.screen
        await made(pilot)
        assert app.screen is opened
        assert [len(app._screen_stacks[name]) for name in NAMES] == [1] * len(NAMES)


async def test_a_key_opens_the_screen_that_was_made() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        await made(pilot)
        waiting = app._screen_stacks["api"][0]
        await pilot.press("f6")
        assert app.screen is waiting
        assert app.screen.is_current
