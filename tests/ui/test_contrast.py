"""Every colour of text can be read on every ground it stands on, in all four themes; states stay apart without M cones.

Which colours there are is read from the sources: whatever styles and style sheets name.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
from rich.segment import Segment
from textual.color import Color
from textual.pilot import Pilot

import console
from console.tui import modes
from console.tui.app import EricApp
from console.tui.theme import builtin_folder, load_themes, variable_defaults
from console.tui.widgets.latency import cause_bar
from engine.requests.causes import Cause, describe
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.colours import as_deuteranope, contrast, distance

pytestmark = pytest.mark.long

THEMES = {theme.name: theme for theme in load_themes([builtin_folder()]).themes}
TEXT, GRAPHICS = {"ericllm-contrast": 7.0}, 3.0
NORMAL = 4.5

SOURCES = [path for kind in ("*.py", "*.tcss") for path in Path(console.__file__).parent.rglob(kind)]
NAMED = re.compile(r"(?P<ground>(?:\bon |background(?:-hover)?: ))?\$(?P<name>[a-z][a-z0-9-]*[a-z0-9])")
GROUNDS = {"background", "surface", "panel", "block-cursor-background"}
"""What a row, a dialog, a top line and a selected row are painted on; any text may be on each of them."""
DRAWN = ("gpu-", "graph-")
"""Bars and curves: no text."""
DECORATION = {"gpu-free", "border", "border-blurred", "panel-border", "panel-border-focus", "boost"}
"""What says nothing: the empty part of a bar, lines around panels without the focus."""


def found(*, as_ground: bool) -> set[str]:
    """The names that the sources use for text, or behind it."""
    uses = [use for path in SOURCES for use in NAMED.finditer(path.read_text("utf-8"))]
    known = set(variables("ericllm-dark"))
    return {use["name"] for use in uses if (use["ground"] is not None) is as_ground} & known


def variables(theme: str) -> dict[str, Color]:
    every = THEMES[theme].to_color_system().generate()
    named = {**every, **variable_defaults(THEMES[theme]), **THEMES[theme].variables}
    return {name: Color.parse(value) for name, value in named.items() if value.startswith("#")}


WRITTEN = sorted(
    name
    for name in found(as_ground=False) - GROUNDS - DECORATION
    if not name.startswith(DRAWN) and not name.endswith(("-background", "-style"))
)
CURVES = sorted(name for name in found(as_ground=False) - DECORATION if name.startswith(DRAWN))


def test_the_sources_name_the_colours_that_are_tested() -> None:
    assert {"muted", "foreground", "primary", "error", "worker-busy", "request-done", "success"} <= set(WRITTEN)
    assert {"gpu-weights", "graph-tokens", "graph-ttft-spread", "graph-axis"} <= set(CURVES)
    assert found(as_ground=True) >= GROUNDS - {"surface"}


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_text_can_be_read_on_every_ground(theme: str) -> None:
    colours, least = variables(theme), TEXT.get(theme, NORMAL)
    pairs = [(text, ground) for text in WRITTEN for ground in sorted(GROUNDS) if text in colours]
    weak = {(text, ground): round(contrast(colours[text], colours[ground]), 2) for text, ground in pairs}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < least} == {}


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_no_two_causes_of_latency_look_alike(theme: str) -> None:
    colours = variables(theme)
    bars = [cause_bar(describe({cause: 1.0}), 1) for cause in get_args(Cause)]
    looks = [(bar.plain, colours[str(bar.spans[0].style).removeprefix("$")]) for bar in bars]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_badges_can_be_read(theme: str) -> None:
    """Text in the colour of the background, on a colour of the theme."""
    colours, least = variables(theme), TEXT.get(theme, NORMAL)
    badges = {
        use[1] for path in SOURCES for use in re.finditer(r"\$background on \$([a-z-]+)", path.read_text("utf-8"))
    }
    assert badges >= {"primary"}
    weak = {badge: round(contrast(colours["background"], colours[badge]), 2) for badge in badges}
    assert {badge: ratio for badge, ratio in weak.items() if ratio < least} == {}


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_bars_and_curves_stand_out_from_the_background(theme: str) -> None:
    colours = variables(theme)
    weak = {name: round(contrast(colours[name], colours["background"]), 2) for name in CURVES}
    assert {name: ratio for name, ratio in weak.items() if ratio < GRAPHICS} == {}


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_a_curve_stands_out_from_the_one_behind_it(theme: str) -> None:
    colours = variables(theme)
    for curve in ("graph-ttft", "graph-itl"):
        assert contrast(colours[curve], colours[f"{curve}-spread"]) >= 1.8


@pytest.mark.parametrize("theme", sorted(THEMES))
def test_the_panel_with_the_focus_has_a_frame_that_stands_out(theme: str) -> None:
    colours = variables(theme)
    assert contrast(colours["primary"], colours["background"]) >= GRAPHICS


@pytest.mark.slow
@pytest.mark.parametrize("theme", sorted(THEMES))
async def test_no_text_on_any_screen_is_hard_to_read(theme: str) -> None:
    least, weak = TEXT.get(theme, NORMAL), {}
    app = EricApp(FakeLink(scenes.busy()), theme=theme)
    async with app.run_test(size=(140, 45)) as pilot:
        for mode in modes.MODES:
            app.action_open(mode.name)
            await pilot.pause()
            for focused in (None, *app.screen.focus_chain):
                app.screen.set_focus(focused)
                await pilot.press("down", "down")
                for text, ratio in await _ratios(pilot):
                    if ratio < least:
                        weak[mode.name, text] = round(ratio, 2)
    assert weak == {}


async def _ratios(pilot: Pilot[None]) -> list[tuple[str, float]]:
    """Every piece of text that is seen, with its contrast. Large digits are drawn with lines and are no text here."""
    await pilot.pause()
    strips = pilot.app.screen._compositor.render_strips(pilot.app.size)
    return [(segment.text.strip(), _ratio(segment)) for strip in strips for segment in strip if _is_text(segment)]


def _is_text(segment: Segment) -> bool:
    has_colours = segment.style is not None and segment.style.color is not None and segment.style.bgcolor is not None
    return has_colours and any(character.isalnum() for character in segment.text)


def _ratio(segment: Segment) -> float:
    assert segment.style is not None
    assert segment.style.color is not None
    assert segment.style.bgcolor is not None
    return contrast(Color.from_rich_color(segment.style.color), Color.from_rich_color(segment.style.bgcolor))


@pytest.mark.parametrize(
    "group",
    [
        ("worker-busy", "worker-idle", "worker-loading", "worker-failed"),
        ("request-queued", "request-prefill", "request-decode", "request-failed"),
        ("gpu-weights", "gpu-kv", "gpu-work", "gpu-others"),
        ("success", "warning", "error"),
        ("graph-ttft", "graph-ttft-spread"),
        ("graph-itl", "graph-itl-spread"),
    ],
    ids=lambda group: group[0].partition("-")[0],
)
def test_states_of_the_safe_theme_stay_apart_for_a_deuteranope(group: tuple[str, ...]) -> None:
    colours = {name: as_deuteranope(variables("ericllm-safe")[name]) for name in group}
    apart = {pair: round(distance(colours[pair[0]], colours[pair[1]]), 3) for pair in combinations(group, 2)}
    assert {pair: how for pair, how in apart.items() if how < 0.08} == {}


def test_red_and_green_do_not_stay_apart_for_a_deuteranope_so_the_measure_can_fail() -> None:
    red, green = as_deuteranope(Color.parse("#b04a30")), as_deuteranope(Color.parse("#6a7a30"))
    assert distance(Color.parse("#b04a30"), Color.parse("#6a7a30")) > 2 * distance(red, green)
