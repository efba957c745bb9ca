"""Terminals with few colours, with none, and without UTF-8: all is still told, and the focus is seen."""

from __future__ import annotations

import pytest
from rich.segment import Segment
from textual.color import Color
from textual.filter import NoColor
from textual.widgets import Input

from console.tui import modes
from console.tui.app import EricApp
from console.tui.screens.logs.view import LogView
from console.tui.screens.settings.panel import SettingTable
from console.tui.widgets.glyphs import is_ascii, to_ascii, wants_ascii
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, until

pytestmark = pytest.mark.long

MODES = [mode.name for mode in modes.MODES]


def segments(app: EricApp) -> list[list[Segment]]:
    return [list(strip) for strip in app.screen._compositor.render_strips(app.size)]


def reversed_text(app: EricApp) -> str:
    """All that is seen in reversed letters."""
    return " ".join(
        segment.text for row in segments(app) for segment in row if segment.style is not None and segment.style.reverse
    )


# -- no colours ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_with_no_color_nothing_has_a_colour(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(scenes.busy()), start=mode)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        styles = [segment.style for row in segments(app) for segment in row if segment.style is not None]
        coloured = [
            style for style in styles if not all(c is None or c.is_default for c in (style.color, style.bgcolor))
        ]
        assert coloured == []
        assert any(isinstance(each, NoColor) for each in app.get_line_filters())


async def test_without_colours_the_row_under_the_cursor_and_the_tab_are_reversed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(), start="settings")
    async with app.run_test(size=(120, 40)) as pilot:
        table = app.screen.query_one(SettingTable)
        await until(pilot, lambda: table.cursor_key is not None)
        await pilot.press("down")
        await until(pilot, lambda: "models_dir" in reversed_text(app))
        assert "8 Settings" in reversed_text(app)
        assert "backend" not in reversed_text(app)


async def test_without_colours_the_panel_with_the_focus_has_a_reversed_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink())
    async with app.run_test(size=(140, 40)) as pilot:
        titles = {}
        for _ in app.screen.focus_chain:
            await pilot.press("tab")
            await pilot.pause()
            titles[app.screen.focused] = {word for word in ("Workers", "Requests") if f" {word} " in reversed_text(app)}
        assert {frozenset(found) for found in titles.values()} >= {frozenset({"Workers"}), frozenset({"Requests"})}


async def test_without_colours_the_caret_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(), start="settings")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("slash", "p", "o", "left")
        box = app.screen.query_one("#find", Input)
        box.cursor_blink = False
        await until(pilot, lambda: "o" in reversed_text(app).split())


async def test_the_command_chosen_in_the_palette_is_underlined_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+p", *"add a wor")
        await until(pilot, lambda: "Add a worker" in " ".join(rows(app)))
        await pilot.press("down")
        underlined = "".join(
            segment.text
            for row in segments(app)
            for segment in row
            if segment.style is not None and segment.style.underline
        )
        assert "Add a worker" in underlined


async def test_a_button_with_the_focus_is_reversed_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("q")
        await until(pilot, lambda: "Cancel" in reversed_text(app))
        assert "Quit" not in reversed_text(app)


async def test_the_cursor_of_the_log_is_seen_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(), start="logs")
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, lambda: app.screen.query_one(LogView).has_focus)
        await pilot.press("up")
        await until(pilot, lambda: "port 8000 is taken" in reversed_text(app))


# -- sixteen colours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "theme"),
    [("truecolor", "ericllm-dark"), ("256", "ericllm-dark"), ("standard", "ericllm-contrast")],
)
async def test_sixteen_colours_get_the_theme_of_pure_ones(
    system: str, theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("textual.constants.COLOR_SYSTEM", system)
    app = EricApp(FakeLink(), theme="auto")
    async with app.run_test():
        assert app.theme == theme
        assert app.preferences.theme_name == "auto"


async def test_a_theme_that_is_asked_for_is_worn_with_sixteen_colours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.constants.COLOR_SYSTEM", "standard")
    app = EricApp(FakeLink(), theme="ericllm-light")
    async with app.run_test():
        assert app.theme == "ericllm-light"


async def test_in_sixteen_colours_the_states_keep_different_ones() -> None:
    app = EricApp(FakeLink(), theme="ericllm-contrast")
    async with app.run_test():
        names = ("worker-busy", "worker-loading", "worker-failed", "gpu-weights", "gpu-work")
        found = {name: _in_sixteen(app.theme_variables[name]) for name in names}
    assert len(set(found.values())) >= 4, found


def _in_sixteen(colour: str) -> int | None:
    from rich.color import ColorSystem

    return Color.parse(colour).rich_color.downgrade(ColorSystem.STANDARD).number


# -- far away ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "full"),
        ({"SSH_CONNECTION": "10.0.0.2 50122 10.0.0.1 22"}, "none"),
        ({"SSH_CONNECTION": "10.0.0.2 50122 10.0.0.1 22", "TEXTUAL_ANIMATIONS": "full"}, "full"),
    ],
)
async def test_nothing_glides_over_ssh_unless_it_is_asked_for(
    environ: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEXTUAL_ANIMATIONS", raising=False)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("textual.constants.TEXTUAL_ANIMATIONS", "full")
    app = EricApp(FakeLink())
    async with app.run_test():
        assert app.animation_level == level


async def test_textual_animations_none_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.constants.TEXTUAL_ANIMATIONS", "none")
    app = EricApp(FakeLink())
    async with app.run_test():
        assert app.animation_level == "none"


# -- no UTF-8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "encoding", "ascii_only"),
    [
        ({"TERM": "xterm-256color"}, "utf-8", False),
        ({"TERM": "screen-256color"}, "UTF-8", False),
        ({"TERM": "xterm"}, "ANSI_X3.4-1968", True),
        ({"TERM": "xterm"}, "iso-8859-1", True),
        ({"TERM": "linux"}, "utf-8", True),
    ],
)
def test_ascii_is_for_locales_without_utf_8_and_the_linux_console(
    environ: dict[str, str], encoding: str, ascii_only: bool
) -> None:
    assert wants_ascii(environ, encoding) is ascii_only


def not_ascii(app: EricApp) -> set[str]:
    return {line.strip() for line in rows(app) if not line.isascii()}


@pytest.mark.parametrize("size", [(80, 24), (140, 45)])
@pytest.mark.parametrize("mode", MODES)
async def test_every_screen_is_ascii_where_there_is_no_more(
    mode: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(scenes.busy()), start=mode)
    async with app.run_test(size=size) as pilot:
        assert is_ascii(app)
        await pilot.pause()
        for focused in app.screen.focus_chain:
            app.screen.set_focus(focused)
            await pilot.press("down")
            await pilot.pause()
            assert not_ascii(app) == set(), focused


@pytest.mark.parametrize("keys", [("question_mark",), ("n",), ("i",), ("x",), ("3", "ctrl+s"), ("2", "e"), ("6", "w")])
async def test_every_dialog_is_ascii_where_there_is_no_more(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(120, 40)) as pilot:
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.05)
        assert not_ascii(app) == set()


def test_a_glyph_becomes_one_character_so_that_columns_stay() -> None:
    assert all(len(to_ascii(glyph)) == 1 for glyph in "●○◔✖✓■□━─▏…–×→⏎▲▼")


async def test_a_secret_is_stars_where_there_are_no_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(), start="settings")
    async with app.run_test(size=(120, 40)) as pilot:
        table = app.screen.query_one(SettingTable)
        await until(pilot, lambda: table.cursor_key is not None)
        table.move_to([row.key for row in table.rows].index("api_key"))
        await pilot.press("enter", *"s3")
        await until(pilot, lambda: any(" ** " in line for line in rows(app)))
        assert not_ascii(app) == set()
        assert "s3" not in " ".join(rows(app))
