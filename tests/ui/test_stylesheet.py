"""The console's stylesheet: parsed once, and anew for another theme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from textual.css import stylesheet

from console.tui.app import EricApp
from console.tui.modes import MODES
from console.tui.stylesheet import Stylesheet
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import until

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def css_parsed_once() -> None:
    """By each app here, to be counted."""


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Any]]:
    """How often each piece of CSS was parsed, by where it is from."""
    counts: Counter[Any] = Counter()
    parse = stylesheet.parse

    def counting(scope: str, css: str, read_from: Any, **how: Any) -> Any:
        counts[read_from, scope, how["tie_breaker"]] += 1
        return parse(scope, css, read_from, **how)

    monkeypatch.setattr(stylesheet, "parse", counting)
    yield counts


async def test_opening_screens_parses_nothing_that_was_parsed_before(parses: Counter[Any]) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(120, 40)) as pilot:
        for mode in MODES:
            await pilot.press(f"f{mode.digit}")
            await until(pilot, lambda mode=mode: app.current_mode == mode.name and app.screen.is_mounted)
            await pilot.pause()
    assert parses and max(parses.values()) == 1


async def test_another_theme_parses_all_anew_and_is_seen(parses: Counter[Any]) -> None:
    app = EricApp(FakeLink(scenes.busy()), theme="ericllm-dark")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        before, dark = set(parses), app.screen.styles.background
        parses.clear()
        app.preferences.apply_theme("ericllm-light")
        await until(pilot, lambda: app.screen.styles.background != dark)
        await pilot.pause()
    assert before <= set(parses) and max(parses.values()) == 1


async def test_a_screen_that_comes_back_is_styled_anew_only_where_the_look_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    styled: list[object] = []
    app = EricApp(FakeLink(scenes.busy()), theme="ericllm-dark")
    async with app.run_test(size=(120, 40)) as pilot:
        for digit in "2121":
            await pilot.press(digit)
            await pilot.pause()
        update_nodes = Stylesheet.update_nodes
        monkeypatch.setattr(
            Stylesheet,
            "update_nodes",
            lambda self, nodes, animate=False: update_nodes(self, seen(nodes), animate),
        )

        def seen(nodes: Iterable[Any]) -> list[Any]:
            styled.extend(found := list(nodes))
            return found

        await pilot.press("2")
        await pilot.pause()
        assert app.current_mode == "models" and app.screen not in styled
        app.preferences.apply_theme("ericllm-light")
        await pilot.pause()
        light = app.screen.styles.background
        await pilot.press("1")
        await pilot.pause()
        assert app.screen in styled and app.screen.styles.background == light
