"""No text of a client, a model, another instance, a chat or a log steers the terminal or is parsed as markup."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from textual.app import App
from textual.content import Content
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widgets import Select

from console.chats import ChatSettings, ChatStore, Preset
from console.link.rpc import as_link
from console.tui import modes
from console.tui.app import EricApp
from console.tui.attached_app import AttachedApp
from console.tui.commands import entries
from console.tui.replay_app import ReplayApp
from console.tui.screens.api.forms import KeyScreen, NewKeyScreen
from console.tui.screens.attach.instances import InstancesScreen
from console.tui.screens.attach.replay import GoToScreen
from console.tui.screens.benches.comparison import BenchComparisonScreen
from console.tui.screens.benches.result import BenchResultScreen
from console.tui.screens.chat.settings import ChatSettingsScreen, PresetsScreen
from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from console.tui.screens.doctor.screen import DoctorScreen
from console.tui.screens.models.adapters import AdaptersScreen
from console.tui.screens.models.comparison import CompareScreen
from console.tui.screens.models.screen import LoadScreen
from console.tui.screens.tune.autotune import TuneFormScreen
from console.tui.widgets.table import Table
from engine.errors import EngineError
from engine.text.printable import ANY_UNSAFE
from tests.fakes import bench_scenes, fleet_scenes, request_scenes, scenes, tune_scenes
from tests.fakes.elsewhere import FakeRemote, recording_of, replay_of
from tests.fakes.hostile import HOSTILE, HostileLink, hostile
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, asked, fill
from tests.ui.seen import until

pytestmark = pytest.mark.long

OWN = re.compile(r"\x1b\[[?>=]?[0-9;]*[A-Za-ln-z]|\x1b\[[0-9;]*m|\x1b\]22;[a-z-]*\x07|\n|\x1b\]52;c;[\w+/]{12,}=*\x07")
"""What is written on purpose: modes, the cursor, colours, the shape of the mouse's pointer, the ends of lines, a copy
that was asked for."""
LEAVES = re.compile(r"quit|command_palette|app\.open|dismiss|leave\b|detach_all")
ASKS = re.compile(r"\x1b\[[0-9]*n")


class Recorder(HeadlessDriver):
    """A terminal that keeps all that is written to it."""

    written: list[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written = []

    @property
    def is_headless(self) -> bool:
        """What is drawn is written."""
        return False

    def write(self, data: str) -> None:
        """Keep it."""
        self.written.append(data)

    def flush(self) -> None:
        """Nothing waits."""


def steering(written: str) -> list[str]:
    """Every piece of what was written that Textual does not write by itself, with what stands around it."""
    left = OWN.sub("", ASKS.sub("\x1b", written))
    return [left[max(0, each.start() - 30) : each.end() + 30] for each in ANY_UNSAFE.finditer(left)]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where pictures, exports and results are written."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def parsed_markup(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was parsed as markup; none of it may be foreign."""
    parsed: list[str] = []
    content, rich_text = Content.from_markup, Text.from_markup

    def as_content(markup: str | Content, **variables: object) -> Content:
        parsed.append(str(markup))
        return content(markup, **variables)

    def as_text(text: str, *args: Any, **options: Any) -> Text:
        parsed.append(text)
        return rich_text(text, *args, **options)

    monkeypatch.setattr(Content, "from_markup", as_content)
    monkeypatch.setattr(Text, "from_markup", as_text)
    yield parsed
    assert [markup for markup in parsed if "click=app.quit" in markup] == []


def hostile_link() -> HostileLink:
    link = FakeLink(fleet_scenes.two_models())
    link.benches.results = bench_scenes.results()
    link.script["tuning.report"] = tune_scenes.found("done")
    link.requests.details = {row.id: request_scenes.with_text() for row in link.current.requests}
    link.failures = {name: EngineError("it cannot be done") for name in ("reconfigure", "load", "download", "save")}
    return HostileLink(link)


async def do_everything(pilot: Pilot[None], base: Screen[Any], met: set[str]) -> None:
    """Run every action of a screen, and those of the dialogs that it opens; choose the first row of every table. met:
    the screens that were there, by their names."""
    met.add(type(base).__name__)
    for table in [*base.query(Table)]:
        if table.rows and table.display and pilot.app.screen is base:
            table.focus()
            await pilot.press("home", "enter")
            await look_around(pilot, base, met)
    for entry in list(entries(base)):
        if entry.node.app is not pilot.app or LEAVES.search(entry.action) or pilot.app.screen is not base:
            continue
        await pilot.app.run_action(entry.action, default_namespace=entry.node)
        await look_around(pilot, base, met)


async def look_around(pilot: Pilot[None], base: Screen[Any], met: set[str]) -> None:
    """Do everything on what was opened, if it is new; then go back."""
    await pilot.pause()
    opened = pilot.app.screen
    if opened is not base and type(opened).__name__ not in met:
        await do_everything(pilot, opened, met)
    while base in pilot.app.screen_stack and pilot.app.screen is not base:
        pilot.app.pop_screen()
        await pilot.pause()


@contextlib.asynccontextmanager
async def recorded(app: App[Any], size: tuple[int, int] = (150, 50)) -> AsyncIterator[Pilot[None]]:
    """The app on a terminal to which nothing foreign may have come when it ends."""
    app.driver_class = Recorder
    async with app.run_test(size=size, headless=False, notifications=True) as pilot:
        driver = app._driver
        assert isinstance(driver, Recorder)
        await pilot.pause()
        yield pilot
        await pilot.pause()
        assert app.is_running
        written = "".join(driver.written)
    assert r"\x1b]52;" in written, "the scene is hostile, and seen"
    assert steering(written) == []


async def filled(pilot: Pilot[None]) -> None:
    """A table of the screen has rows."""
    await until(pilot, lambda: any(len(table.rows) > 1 for table in pilot.app.screen.query(Table)))


async def opens(pilot: Pilot[None], kind: type[Screen[Any]], *keys: str) -> None:
    """Press keys until a screen of that kind is there, see all of it, and close it."""
    await pilot.press(*keys)
    await until(pilot, lambda: isinstance(pilot.app.screen, kind))
    await pilot.pause()
    await pilot.press("escape")
    await until(pilot, lambda: not isinstance(pilot.app.screen, kind))


@pytest.mark.parametrize("mode", [mode.name for mode in modes.MODES])
async def test_nothing_foreign_steers_the_terminal_whatever_is_pressed(mode: str) -> None:
    async with recorded(EricApp(as_link(hostile_link()), start=mode)) as pilot:
        await do_everything(pilot, pilot.app.screen, set())


async def test_nothing_foreign_steers_the_terminal_in_what_takes_several_keys() -> None:
    async with recorded(EricApp(as_link(hostile_link()), start="models")) as pilot:
        app = pilot.app
        await filled(pilot)
        await opens(pilot, CompareScreen, "space", "down", "v")
        await opens(pilot, AdaptersScreen, "d")
        for action, kind in (("doctor", DoctorScreen), ("autotune", TuneFormScreen)):
            await app.run_action(f"app.{action}")
            await opens(pilot, kind)
        await pilot.press("f5", "b")
        await filled(pilot)
        await opens(pilot, BenchResultScreen, "enter")
        await opens(pilot, BenchComparisonScreen, "space", "down", "C")
        await app.run_action("app.toggle_api")
        await opens(pilot, ConfirmScreen)
        await pilot.press("6", "w")
        await until(pilot, lambda: isinstance(app.screen, KeyScreen))
        await opens(pilot, NewKeyScreen, *"ci", "enter")


async def test_nothing_foreign_steers_the_terminal_in_a_chat(tmp_path: Path) -> None:
    answer = (
        f"[a](http:e{HOSTILE}) `{HOSTILE}`\n```python\nprint({HOSTILE!r}) # {HOSTILE}\n```\n> {HOSTILE}\n# {HOSTILE}\n"
    )
    settings = ChatSettings(system_prompt=HOSTILE, model=f"{HOSTILE}m")
    fill(tmp_path / "chats.db", HOSTILE, answer, others=(HOSTILE,), settings=settings)
    store = ChatStore(tmp_path / "chats.db")
    store.keep_preset(Preset(name=HOSTILE, settings=settings))
    store.rename(store.conversations()[0].id, HOSTILE)
    store.close()
    app = EricApp(as_link(hostile_link()), start="chat", chats=tmp_path / "chats.db")
    async with recorded(app) as pilot:
        await until(pilot, lambda: len(answers(pilot)) == 1)
        await asked(pilot, "And now?")
        await pilot.press("ctrl+o")
        await opens(pilot, PresetsScreen, "alt+p")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, ChatSettingsScreen))
        app.screen.query_one(Select).focus()
        await opens(pilot, ChatSettingsScreen, "enter", "escape")
        await opens(pilot, LineScreen, "alt+t")
        await pilot.press("alt+e")


async def test_nothing_foreign_steers_the_terminal_from_instances_elsewhere() -> None:
    remotes = [FakeRemote("10.0.0.7:8000"), FakeRemote("10.0.0.8:8000", scenes.failed())]
    remotes[1].lose("no answer")
    async with recorded(AttachedApp([as_link(HostileLink(remote)) for remote in remotes])) as pilot:
        await opens(pilot, InstancesScreen, "f9")
        await pilot.press("I")


async def test_nothing_foreign_steers_the_terminal_from_a_recording(tmp_path: Path) -> None:
    replay, _ = replay_of(recording_of(hostile(scenes.busy()), tmp_path / "night.rec"))
    async with recorded(ReplayApp(replay)) as pilot:
        await opens(pilot, GoToScreen, "g")
        await pilot.press("end")


async def test_nothing_foreign_steers_the_terminal_where_it_is_narrow_and_ascii() -> None:
    app = EricApp(as_link(hostile_link()), start="models")
    app.add_class("-ascii")
    async with recorded(app, size=(60, 20)) as pilot:
        await filled(pilot)
        await opens(pilot, LoadScreen, "e")
