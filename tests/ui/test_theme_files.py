"""Themes: files with one required colour, mistakes reported and survived, every variable there, text readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.color import Color
from textual.theme import Theme

from console.cli.parser import Parser, add_every_setting, parse
from console.settings.sources import Sources
from console.tui.app import EricApp
from console.tui.theme import DEFAULT_THEME, builtin_folder, load_themes, user_folder, variable_defaults
from tests.fakes.link import FakeLink, FakeSettings
from tests.ui.seen import rows, screen_text, toasts, until

BUILT_IN = {theme.name: theme for theme in load_themes([builtin_folder()]).themes}


def _variables(theme: Theme) -> dict[str, str]:
    return {**variable_defaults(theme), **theme.to_color_system().generate(), **theme.variables}


def _every_flag() -> Parser:
    parser = Parser()
    add_every_setting(parser, "")
    return parser


def test_the_console_ships_dark_light_high_contrast_and_colour_blind_safe_themes() -> None:
    assert set(BUILT_IN) == {"ericllm-dark", "ericllm-light", "ericllm-contrast", "ericllm-safe"}
    assert not load_themes([builtin_folder()]).problems
    assert not BUILT_IN["ericllm-light"].dark


def test_primary_alone_makes_a_theme_with_every_variable(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('primary = "#ff8800"\n')
    (theme,) = load_themes([tmp_path]).themes
    assert theme.name == "mine"
    assert all(Color.parse(value) for value in variable_defaults(theme).values())
    assert variable_defaults(theme)["gpu-weights"] == Color.parse(theme.to_color_system().generate()["primary"]).css


def test_groups_become_css_variables(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('primary = "teal"\n[gpu]\nweights = "red"\n[graph]\nttft_spread = "#123456"\n')
    (theme,) = load_themes([tmp_path]).themes
    assert theme.variables == {"gpu-weights": "red", "graph-ttft-spread": "#123456"}


def test_a_user_theme_replaces_the_built_in_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "ericllm-dark"\nprimary = "#010203"\n')
    themes = {theme.name: theme for theme in load_themes([builtin_folder(), tmp_path]).themes}
    assert themes["ericllm-dark"].primary == "#010203"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("secondary = 'red'", "primary is missing"),
        ("primary = 'reddish'", "primary: 'reddish' is not a colour"),
        ("primary = 'red'\n[gpu]\nwieghts = 'red'", "gpu.wieghts is not part of a theme; did you mean weights?"),
        ("primary = 'red'\n[worker]\nbusy = 3", "worker.busy: must be a valid string"),
        ("primary = 'red'\n[variables]\nbordr = 'red'", "bordr is not a variable; did you mean border?"),
        ("primary = 'red'\n[variables]\nborder = 'reddish'", "border: 'reddish' is not a colour"),
        ("primary = 'red'\n[variables]\nlink-style = 'thick'", "link-style: 'thick' is not a style"),
        ("primary = ", "Invalid value"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_a_broken_file_is_named_with_its_mistake_and_the_others_load(
    tmp_path: Path, content: str | bytes, complaint: str
) -> None:
    (tmp_path / "bad.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "good.toml").write_text("primary = 'red'")
    found = load_themes([tmp_path])
    assert [theme.name for theme in found.themes] == ["good"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("bad.toml: ")
    assert complaint in found.problems[0]


def test_all_mistakes_of_a_file_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        "primry = 'red'\nwarning = 'loud'\n[graph]\ntokns = 'red'\n[variables]\nlnk = 'x'"
    )
    (problem,) = load_themes([tmp_path]).problems
    assert all(
        word in problem for word in ("primary is missing", "primry", "'loud'", "graph.tokns", "lnk is not a variable")
    )
    assert "\n" not in problem


async def test_one_message_names_all_broken_files_and_the_console_starts() -> None:
    folder = user_folder()
    folder.mkdir(parents=True)
    (folder / "one.toml").write_text("primary = 1")
    (folder / "two.toml").write_text("[")
    app = EricApp(FakeLink(), theme="nowhere")
    async with app.run_test(notifications=True) as pilot:
        await pilot.pause()
        (toast,) = toasts(app)
        assert all(name in toast for name in ("one.toml", "two.toml", "nowhere"))
        assert app.theme == DEFAULT_THEME


@pytest.mark.parametrize("name", sorted(BUILT_IN))
async def test_a_theme_can_be_chosen_while_the_console_runs(name: str) -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        app.theme = name
        await pilot.pause()
        assert app.theme_variables["gpu-weights"] == BUILT_IN[name].variables["gpu-weights"]


async def test_a_theme_is_worn_anew_when_its_file_is_saved() -> None:
    user_folder().mkdir(parents=True)
    (user_folder() / "mine.toml").write_text("primary = '#112233'")
    app = EricApp(FakeLink(), theme="mine")
    async with app.run_test() as pilot:
        (user_folder() / "mine.toml").write_text("primary = '#445566'\n[gpu]\nweights = '#778899'")
        app.preferences.look()
        await pilot.pause()
        assert app.theme_variables["primary"] == "#445566"
        assert app.theme_variables["gpu-weights"] == "#778899"


async def test_a_theme_that_is_broken_while_it_is_worn_stays_on_and_is_told_once() -> None:
    user_folder().mkdir(parents=True)
    (user_folder() / "mine.toml").write_text("primary = '#112233'")
    app = EricApp(FakeLink(), theme="mine")
    async with app.run_test(notifications=True) as pilot:
        (user_folder() / "mine.toml").write_text("primary = 'reddish'")
        app.preferences.look()
        app.preferences.look()
        await pilot.pause()
        assert app.theme_variables["primary"] == "#112233"
        (toast,) = toasts(app)
        assert toast == "mine.toml: primary: 'reddish' is not a colour"


async def test_a_file_makes_a_value_of_the_setting() -> None:
    """By its flag, and among those of the Settings screen."""
    user_folder().mkdir(parents=True)
    (user_folder() / "mine.toml").write_text("primary = '#112233'")
    sources = Sources.read(parse(["--theme", "mine"], _every_flag()), env={})
    link = FakeLink()
    link.settings = FakeSettings(link, sources, names=("theme",))
    app = EricApp(link, theme=sources.settings().theme, start="settings")
    async with app.run_test(size=(120, 30)) as pilot:
        assert app.theme_variables["primary"] == "#112233"
        await until(pilot, lambda: "ericllm-safe" in screen_text(app))
        assert any("theme" in row and "mine" in row for row in rows(app))


def test_the_documentation_names_the_themes_that_come_with_the_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "console.md").read_text()
    assert [name for name in BUILT_IN if f"`{name}`" not in page] == []


async def test_a_theme_saved_while_the_console_runs_can_be_chosen() -> None:
    app = EricApp(FakeLink())
    async with app.run_test():
        user_folder().mkdir(parents=True)
        (user_folder() / "late.toml").write_text("primary = '#112233'")
        app.preferences.look()
        assert "late" in app.available_themes
