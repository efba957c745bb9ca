"""A console that takes no commands, and one whose instance went silent: what they offer, and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from textual.dom import DOMNode
from textual.pilot import Pilot
from textual.widgets import Static

from console.link.frames import Frame
from console.link.protocol import ApiStatus
from console.link.readonly import ReadOnlyLink
from console.link.remote.frame_reader import Connection
from console.link.remote.http import Instance, OutOfReach, address_of
from console.link.rpc import CALLS, Call, as_link
from console.link.status import CHAT, LinkStatus
from console.tui.app import EricApp
from console.tui.attached_app import AttachedApp
from console.tui.commands import help_entries, palette_entries
from console.tui.modes import MODES
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.dashboard.panels.workers import WorkersPanel
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.help import HelpScreen
from console.tui.screens.models.screen import ModelBox
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.widgets.status_line import status_line
from console.tui.widgets.table import OpeningTable
from tests.fakes import scenes
from tests.fakes.elsewhere import FakeRemote
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, toasts, until

REFUSED = "This console is read-only: it shows everything and changes nothing"


def said(app: EricApp) -> list[str]:
    return toasts(app)


@pytest.mark.parametrize("key", ["right_square_bracket", "left_square_bracket", "plus", "minus", "a", "x"])
async def test_a_key_that_commands_says_at_once_why_it_does_not(key: str) -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(as_link(ReadOnlyLink(link)))
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.pause()
        await pilot.press("down", key)
        await until(pilot, lambda: said(app) == [REFUSED])
        assert link.commands == []


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("api", "w"),
        ("api", "l"),
        ("api", "x"),
        ("api", "d"),
        ("models", "u"),
        ("tune", "f"),
        ("tune", "s"),
        ("settings", "e"),
        ("settings", "enter"),
        ("dashboard", "D"),
    ],
)
async def test_read_only_no_key_opens_a_form_or_a_question_and_each_says_why(mode: str, key: str) -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(as_link(ReadOnlyLink(link)), start=mode)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await until(pilot, lambda: app.current_mode == mode and app.screen.is_mounted)
        await pilot.pause()
        focused = app.focused
        await pilot.press(key)
        await until(pilot, lambda: said(app) == [REFUSED])
        assert (app.screen.is_modal, app.focused, link.commands) == (False, focused, [])


async def test_read_only_a_question_stays_in_the_box_of_the_chat() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(scenes.busy()))), start="chat")
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await until(pilot, lambda: isinstance(app.focused, ChatInput))
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: said(app) == [REFUSED])
        assert app.screen.query_one(ChatInput).text == "hi"


@pytest.mark.parametrize(
    ("mode", "hints"),
    [
        ("api", ("w: create", "d switches")),
        ("models", ("u unloads", "o: load")),
        ("tune", (" − ", "s sends")),
    ],
)
async def test_read_only_no_text_names_a_key_that_changes_the_engine(mode: str, hints: tuple[str, ...]) -> None:
    link = FakeLink(scenes.busy())
    link.api.change_report(keys=())
    app = EricApp(as_link(ReadOnlyLink(link)), start=mode)
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: app.current_mode == mode and "q Quit" in rows(app)[-1])
        await pilot.pause()
        assert [hint for hint in hints if hint in screen_text(app)] == []


async def test_read_only_there_is_nothing_to_type_or_click_that_would_command() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(scenes.busy()))), start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "NeuralHermes-7B" in screen_text(app))
        assert "Enter" not in app.screen.query_one(ModelBox).placeholder
        assert "Enter loads" not in screen_text(app)
        await pilot.press("1")
        await until(pilot, lambda: "Workers 2" in rows(app)[1])
        assert "+" not in rows(app)[1]


async def test_read_only_the_help_and_the_palette_leave_commands_out() -> None:
    app = EricApp(as_link(ReadOnlyLink(FakeLink(scenes.busy()))))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        titles = {entry.title for entry in palette_entries(app.screen)}
        assert not titles & {"Cancel the selected request", "Add a worker", "Switch the HTTP API on or off"}
        assert "Quit the console" in titles


async def test_an_attached_console_does_not_offer_to_switch_the_api_off() -> None:
    app = AttachedApp([FakeRemote("10.0.0.7:8000")])
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "q Quit" in rows(app)[-1])
        assert "a API" not in rows(app)[-1]


class AskedLink(ReadOnlyLink):
    """Notes what it was asked to change."""

    def __init__(self, link: FakeLink) -> None:
        super().__init__(link)
        self.asked: list[str] = []

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        if call.changes:
            self.asked.append(call.name)
        return await super().ask(call, arguments)

    async def start_api(self) -> None:
        self.asked.append("engine.start_api")
        await super().start_api()

    async def stop_api(self, *, finish: bool = False) -> bool:
        self.asked.append("engine.stop_api")
        return await super().stop_api(finish=finish)


LEAVE = {"app.quit", "app.help_quit", "app.command_palette", "app.suspend_process", "app.change_theme", "app.picture"}


def doable(app: EricApp) -> dict[tuple[str, str], DOMNode]:
    """Every action that a key or the palette offers now, and the node that it is of."""
    found: dict[tuple[str, str], DOMNode] = {}
    for active in app.screen.active_bindings.values():
        if active.enabled and active.binding.action not in LEAVE:
            found[type(active.node).__name__, active.binding.action] = active.node
    for entry in (*help_entries(app.screen), *palette_entries(app.screen)):
        if entry.action not in LEAVE:
            found[type(entry.node).__name__, entry.action] = entry.node
    return found


async def try_all(app: EricApp, pilot: Pilot[None], link: AskedLink, depth: int) -> None:
    """Do all that is offered, with every widget focused in turn, on this screen and on what it opens."""
    screen, done = app.screen, set[tuple[str, str]]()
    for focused in [None, *screen.focus_chain]:
        screen.set_focus(focused)
        await pilot.pause()
        for key, node in doable(app).items():
            if key in done or key[1].startswith(("app.open(", "app.at(")):
                continue
            done.add(key)
            if focused is not None and focused.is_attached:
                screen.set_focus(focused)
            await app.run_action(key[1], node)
            await pilot.pause()
            while app.screen is not screen and len(app.screen_stack) > 1:
                if isinstance(app.screen, ConfirmScreen):
                    app.screen.dismiss(True)
                elif depth and not isinstance(app.screen, HelpScreen):
                    await try_all(app, pilot, link, depth - 1)
                    if app.screen is not screen and len(app.screen_stack) > 1:
                        app.pop_screen()
                else:
                    app.pop_screen()
                await pilot.pause()
            assert link.asked == [], key
            if app.screen is not screen:
                return


@pytest.mark.parametrize("mode", [mode.name for mode in MODES])
async def test_read_only_no_key_and_no_entry_of_the_palette_reaches_a_call_that_changes_anything(mode: str) -> None:
    link = AskedLink(FakeLink(scenes.busy()))
    app = EricApp(as_link(link), start=mode)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.current_mode == mode and app.screen.is_mounted)
        await pilot.pause()
        await try_all(app, pilot, link, depth=1)
        await until(pilot, lambda: not any(each.group == "commands" and each.is_running for each in app.workers))
        assert link.asked == []


NEEDS_ADMIN = "The key of this console does not allow that: it needs scope admin"


def watching(*, uses: bool = False) -> FakeRemote:
    """An instance whose key may watch. uses: and chat."""
    calls = frozenset(name for name, call in CALLS.items() if call.scope == "watch") | ({CHAT} if uses else set())
    remote = FakeRemote("10.0.0.7:8000", scenes.busy())
    remote.stands = LinkStatus(name=remote.stands.name, reach="live", read_only=True, calls=calls)
    return remote


@pytest.mark.parametrize("mode", ["dashboard", "requests"])
async def test_a_key_that_may_only_watch_opens_no_request_and_says_why(mode: str) -> None:
    remote = watching()
    app = AttachedApp([remote])
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        app.action_open(mode)
        await until(pilot, lambda: "q Quit" in rows(app)[-1] and bool(app.screen.query(OpeningTable)))
        await pilot.pause()
        await pilot.press("down")
        assert "Open" not in rows(app)[-1]
        assert "Open the row" not in {entry.title for entry in help_entries(app.screen)}
        await pilot.press("enter")
        await until(pilot, lambda: said(app) == [NEEDS_ADMIN])
        assert not app.screen.is_modal
        remote.stands = LinkStatus(name=remote.stands.name, reach="live")
        await until(pilot, lambda: "Open" in rows(app)[-1])


async def test_a_key_that_may_only_watch_still_opens_workers_and_groups() -> None:
    app = AttachedApp([watching()])
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        await until(pilot, lambda: "q Quit" in rows(app)[-1])
        app.screen.query_one(WorkersPanel).table.focus()
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, WorkerScreen))
        await pilot.press("escape", "4", "g", "down")
        await until(pilot, lambda: "Requests: by client" in screen_text(app) and "Open" in rows(app)[-1])


async def test_a_key_that_may_only_watch_is_told_that_no_fit_is_estimated_and_asks_for_none() -> None:
    remote = watching()
    app = AttachedApp([remote])
    async with app.run_test(size=(160, 44)) as pilot:
        app.action_open("models")
        await until(pilot, lambda: "Fit not estimated." in screen_text(app))
        assert str(app.screen.query_one("#brief", Static).content) == f"demo  Fit not estimated. {NEEDS_ADMIN}"
        assert remote.asked_for("models.estimate") == []


async def test_a_key_that_may_only_watch_is_not_offered_the_doctor() -> None:
    remote = watching()
    app = AttachedApp([remote])
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        assert "Doctor" not in {entry.title for entry in palette_entries(app.screen)}
        remote.stands = LinkStatus(name=remote.stands.name, reach="live")
        await until(pilot, lambda: "Doctor" in {entry.title for entry in palette_entries(app.screen)})


async def test_a_key_that_may_use_and_watch_chats_and_changes_nothing() -> None:
    remote = watching(uses=True)
    app = AttachedApp([remote])
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        app.action_open("chat")
        await until(pilot, lambda: isinstance(app.focused, ChatInput) and "Send" in rows(app)[-1])
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: [chat[0][0].content for chat in remote.chats] == ["hi"])
        await pilot.press("f1", "right_square_bracket")
        await until(pilot, lambda: said(app) == [REFUSED])
        assert remote.commands == []


async def test_a_key_that_may_only_watch_does_not_chat() -> None:
    remote = watching()
    app = AttachedApp([remote])
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        app.action_open("chat")
        await until(pilot, lambda: isinstance(app.focused, ChatInput) and REFUSED in screen_text(app))
        assert "Send" not in rows(app)[-1]
        await pilot.press("h", "i", "enter")
        await until(pilot, lambda: said(app) == [REFUSED])
        assert (app.screen.query_one(ChatInput).text, remote.chats) == ("hi", [])


def test_an_instance_that_goes_silent_is_said_to_be_after_three_seconds() -> None:
    now = [100.0]
    connection = Connection("gpu1:8000", 2.0, lambda: now[0])
    connection.receive(Frame(snapshot=scenes.busy(), api=ApiStatus()))
    found = []
    for passed in (0.0, 1.5, 2.9, 3.0, 4.7):
        now[0] = 100.0 + passed
        found.append((connection.standing().silent_s, connection.standing().stale))
    assert found == [(0, False), (0, False), (0, False), (3, True), (4, True)]
    connection.receive(Frame(snapshot=scenes.busy(), api=ApiStatus()))
    assert not connection.standing().stale


def test_an_instance_that_went_silent_is_sent_no_command() -> None:
    now = [100.0]
    connection = Connection("gpu1:8000", 2.0, lambda: now[0])
    connection.receive(Frame(snapshot=scenes.busy(), api=ApiStatus()))
    connection.check()
    now[0] += 3.7
    with pytest.raises(OutOfReach, match="No data from gpu1:8000 for 3 s: nothing was sent to it"):
        connection.check()
    connection.receive(Frame(snapshot=scenes.busy(), api=ApiStatus()))
    connection.check()


async def test_the_age_of_the_data_is_known_after_the_connection_is_lost() -> None:
    now = [100.0]

    async def pause(seconds: float) -> None:
        now[0] += 9.0
        found.append(connection.standing())
        raise asyncio.CancelledError

    found: list[LinkStatus] = []
    connection = Connection("127.0.0.1:1", 2.0, lambda: now[0], pause)
    connection.receive(Frame(snapshot=scenes.busy(), api=ApiStatus()))
    async with Instance(address_of("127.0.0.1:1")) as instance:
        with pytest.raises(asyncio.CancelledError):
            await connection.follow(instance)
    assert (found[0].reach, found[0].silent_s) == ("lost", 9)


@pytest.mark.parametrize("width", [58, 78, 98, 158])
def test_the_header_says_how_old_the_data_of_a_lost_connection_is(width: int) -> None:
    standing = LinkStatus(name="gpu1:8000", reach="lost", reason="it does not answer", retry_in_s=2.0, silent_s=12)
    assert "✖ connection lost, data 12 s old" in status_line(scenes.busy(), ApiStatus(), width, standing).plain


async def test_the_age_of_what_is_shown_takes_the_place_of_ready() -> None:
    remote = FakeRemote("10.0.0.7:8000")
    app = AttachedApp([remote, FakeRemote("10.0.0.8:8000")])
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "● ready" in rows(app)[0])
        remote.stands = LinkStatus(name="10.0.0.7:8000", reach="live", silent_s=3)
        await until(pilot, lambda: "no data for 3 s" in rows(app)[0])
        assert "ready" not in rows(app)[0]
        assert app.has_class("-stale")
        assert "◌ no data for 3 s" in rows(app)[-2]
