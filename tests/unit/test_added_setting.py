"""A setting is one row: flag, variable, key of config.toml, line on the screen, section of docs, refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from console.cli.parser import Parser, add_every_setting, parse
from console.runtime.loading import refuse_unhonoured
from console.settings.config_file import sample
from console.settings.running_settings import LiveSettings
from console.settings.schema import Flag, Settings, add_setting, remove_setting
from console.settings.sources import Sources, changed
from console.tui.app import EricApp
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from tests.fakes.link import FakeLink, FakeSettings
from tests.ui.seen import rows
from tools.docs_pages.settings import page

ROW = Annotated[
    int | None,
    Flag("Engine", "N", backends=("exllamav2",), example=3, when="load"),
    Field(ge=1, le=9, description="Greetings to a client"),
]


@pytest.fixture(autouse=True)
def greetings() -> Iterator[None]:
    """A row more."""
    add_setting("greetings", ROW, None)
    yield
    remove_setting("greetings")


def value(sources: Sources) -> object:
    """The setting, as these sources have it."""
    return dict(sources.settings())["greetings"]


def test_it_is_a_flag_a_variable_and_a_key_of_config_toml(tmp_path: Path) -> None:
    parser = Parser()
    add_every_setting(parser, "")
    assert "--greetings N" in parser.format_help()
    file = tmp_path / "config.toml"
    assert value(Sources.read(parse(["--greetings", "2"], parser), env={}, file=file)) == 2
    assert value(Sources.read({}, env={"ERICLLM_GREETINGS": "4"}, file=file)) == 4
    file.write_text("greetings = 5\n")
    assert value(Sources.read({}, env={}, file=file)) == 5
    assert "# Greetings to a client." in sample() and "# greetings = 3" in sample()
    with pytest.raises(InvalidRequest, match="--greetings 10"):
        changed(Settings(), {"greetings": 10})


async def test_it_is_a_line_of_the_settings_screen_that_can_be_saved(tmp_path: Path) -> None:
    sources = Sources(file=tmp_path / "config.toml")
    live = LiveSettings(Engine(EngineConfig()), Settings(), sources)
    assert (await live.save("greetings", "7")).value == "7"
    assert (tmp_path / "config.toml").read_text().strip() == "greetings = 7"
    link = FakeLink()
    link.settings = FakeSettings(link, Sources(saved={"greetings": 7}), names=("greetings",))
    async with EricApp(link, start="settings").run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        assert any("greetings" in row and "7" in row for row in rows(pilot.app))


def test_it_is_a_section_of_the_docs() -> None:
    assert "### `--greetings N`\n\nGreetings to a client. Not set by default. Min 1, max 9." in page()


def test_it_is_refused_by_a_backend_that_does_not_know_it() -> None:
    settings = changed(Settings(), {"greetings": 2})
    refuse_unhonoured(settings, "exllamav2")
    with pytest.raises(InvalidRequest, match="--greetings means nothing to the torch backend"):
        refuse_unhonoured(settings, "torch")
