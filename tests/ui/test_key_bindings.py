"""Keys as data: ids, tooltips, a palette entry and something to click for each, and no key that means two things."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from textual.binding import Binding
from textual.screen import ModalScreen, Screen

from console.link.protocol import ApiStatus
from console.tui import keymap, modes
from console.tui.app import EricApp
from console.tui.binding_index import DeclaredBinding, all_bindings, binding_owners, can_conflict
from console.tui.commands import BindingCommands, entries
from console.tui.keymap import ConsoleBinding
from console.tui.modes import MODES
from console.tui.screens.base import AppScreen
from console.tui.screens.help import HelpScreen
from console.tui.widgets.footer import KeyRow
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, until

BOUND = all_bindings()
EATEN = {
    *(f"ctrl+{letter}" for letter in "abcgopqstz"),  # tmux, screen, Zellij; flow control, job control, interrupt
    *("ctrl+n", "ctrl+h", "ctrl+y", "ctrl+v", "ctrl+w", "ctrl+j", "ctrl+i", "ctrl+m", "ctrl+@", "ctrl+backslash"),
    *("ctrl+enter", "shift+enter", "ctrl+space", "ctrl+tab", "ctrl+shift+tab", "shift+pageup", "shift+pagedown"),
    *("ctrl+pageup", "ctrl+pagedown", "ctrl+plus", "ctrl+minus", "ctrl+equals_sign", "ctrl+0", "alt+enter"),
    *("ctrl+up", "ctrl+down", "ctrl+left", "ctrl+right"),
    *(f"alt+{digit}" for digit in range(10)),
    *(f"f{number}" for number in range(1, 13)),  # desktops and terminals: help, menu, full screen, brightness
}
"""Keys that many terminals, multiplexers or desktops keep for themselves."""


def place(bound: DeclaredBinding) -> str:
    return "everywhere" if bound.owner is None else bound.owner.__name__


def is_dialog(bound: DeclaredBinding) -> bool:
    return bound.owner is not None and issubclass(bound.owner, ModalScreen)


@pytest.mark.parametrize("bound", BOUND, ids=lambda bound: f"{place(bound)}-{bound.id}")
def test_every_binding_has_an_id_and_a_tooltip(bound: DeclaredBinding) -> None:
    assert bound.id
    assert bound.tooltip


def test_no_key_is_bound_twice_in_one_place() -> None:
    keys = Counter((place(bound), key) for bound in BOUND for key in bound.keys)
    assert [each for each, times in keys.items() if times > 1] == []


def test_no_screen_takes_a_key_of_the_whole_console() -> None:
    everywhere = {key: bound.id for bound in BOUND if bound.owner is None for key in bound.keys}
    screens = [bound for bound in BOUND if bound.owner is not None and issubclass(bound.owner, Screen)]
    taken = {
        (place(bound), key)
        for bound in screens
        if not is_dialog(bound)
        for key in bound.keys
        if everywhere.get(key, bound.id) != bound.id
    }
    assert taken == set()


def test_keys_of_the_whole_console_change_nothing() -> None:
    assert [binding.id for binding in keymap.BINDINGS if isinstance(binding, ConsoleBinding) and binding.mutates] == []


@pytest.mark.parametrize("mode", [mode.name for mode in modes.MODES if mode.name not in ("dashboard", "tune")])
async def test_a_knob_is_turned_by_a_key_on_dashboard_and_tune_alone_and_everywhere_by_the_palette(mode: str) -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start=mode)
    async with app.run_test() as pilot:
        await pilot.pause()
        await pilot.press("left_square_bracket", "right_square_bracket", *(() if mode == "api" else ("a",)))
        assert (link.commands, isinstance(app.screen, ModalScreen)) == ([], False)
        hits = [hit async for hit in BindingCommands(app.screen).search("add a worker")]
        await hits[0].command()  # type: ignore[misc]
        await until(pilot, lambda: link.commands == [("reconfigure", {"num_workers": 3})])


def test_no_binding_id_is_used_for_two_actions() -> None:
    actions: dict[str, set[str]] = defaultdict(set)
    for bound in BOUND:
        actions[bound.id].add(bound.action)
    assert {name: found for name, found in actions.items() if len(found) > 1} == {}


def test_no_action_rests_only_on_a_key_that_terminals_or_multiplexers_eat() -> None:
    keys: dict[tuple[str, str], set[str]] = defaultdict(set)
    for bound in BOUND:
        keys[place(bound), bound.action] |= set(bound.keys)
    lost = {each: found for each, found in keys.items() if found <= EATEN}
    lost.pop(
        ("everywhere", "app.help_quit"), None
    )  # says how to quit to who expects ctrl+c to; q and the palette do it
    assert lost == {}


def focusable(app: EricApp) -> list[str]:
    return [widget.css_identifier for widget in app.screen.focus_chain if type(widget) in binding_owners()]


@pytest.mark.parametrize("mode", [mode.name for mode in modes.MODES])
async def test_every_action_of_a_screen_and_of_what_is_on_it_is_in_the_palette(mode: str) -> None:
    app = EricApp(FakeLink(scenes.busy()), start=mode)
    async with app.run_test(size=(140, 50)) as pilot:
        await pilot.pause()
        places: list[type | None] = [None, *type(app.screen).__mro__]
        for focused in (None, *app.screen.focus_chain):
            app.screen.set_focus(focused)
            await pilot.pause()
            meant = [*places, *(type(focused).__mro__ if focused is not None else ())]
            wanted = {bound.tooltip for bound in BOUND if bound.owner in meant and not bound.system}
            titles = {entry.title for entry in entries(app.screen)}
            missing = wanted - titles
            assert missing <= {title for title in missing if not _can_now(app, title, meant)}, (mode, focused)


def _can_now(app: EricApp, title: str, meant: list[type | None]) -> bool:
    """Whether the screen says that an action does something now; next_model, say, does not with one model."""
    bound = next(bound for bound in BOUND if bound.tooltip == title and bound.owner in meant)
    name = bound.action.rpartition(".")[2].partition("(")[0]
    node = app if bound.action.startswith("app.") else app.screen
    offered = Binding("", bound.action, id=bound.id)
    return (
        node.check_action(name, ()) is True and isinstance(app.screen, AppScreen) and app.screen.offers(node, offered)
    )


async def test_the_palette_knows_keys_that_are_text_to_the_box_with_the_focus() -> None:
    app = EricApp(FakeLink(), start="chat")
    async with app.run_test() as pilot:
        await pilot.pause()
        hits = [hit async for hit in BindingCommands(app.screen).search("switch the http api")]
        assert len(hits) == 1


async def test_a_click_in_the_help_does_what_the_line_says() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(100, 60)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        y, line = next((y, line) for y, line in enumerate(rows(app)) if "Add a worker" in line)
        await pilot.click(offset=(line.index("Add a worker") + 2, y))
        await until(pilot, lambda: ("reconfigure", {"num_workers": 3}) in link.commands)
        assert not isinstance(app.screen, HelpScreen)


async def test_help_of_the_chat_lists_no_key_that_is_typed() -> None:
    app = EricApp(FakeLink(), start="chat")
    async with app.run_test(size=(120, 80)) as pilot:
        await until(pilot, lambda: "Send" in rows(app)[-1])
        await pilot.press("escape", "alt+h")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert "Drain or resume" not in "\n".join(rows(app))


async def test_keys_that_the_engine_would_refuse_are_not_offered() -> None:
    link = FakeLink(scenes.cpu_idle())
    app = EricApp(link, start="tune")
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: app.current_mode == "tune" and app.screen.is_mounted)

        def offered() -> set[str]:
            return {each.binding.id or "" for each in app.screen.active_bindings.values() if each.enabled}

        await until(pilot, lambda: {"tune.load", "tune.find"} <= offered())
        await pilot.press("A")
        await pilot.pause()
        assert "alerts.clear" not in offered()
        await pilot.press("escape", "1", "d")
        await until(pilot, lambda: "devices.measure" in offered())
        link.change(running=1)
        app.refresh_screen()
        await until(pilot, lambda: "devices.close" in offered() and "devices.measure" not in offered())
        await pilot.press("escape", "i")
        await until(pilot, lambda: "worker.restart" in offered())
        assert "worker.drain" not in offered()  # it is the last one
        await pilot.press("escape", "3")
        await until(pilot, lambda: "chat.send" in offered())
        link.change(draining_since=scenes.NOW)
        app.refresh_screen()
        await until(pilot, lambda: "chat.stop" not in offered() and "chat.send" not in offered())
        await pilot.press("f5")
        await until(pilot, lambda: "tune.view" in offered() and not {"tune.load", "tune.find"} & offered())


async def test_help_begins_with_the_keys_of_what_has_the_focus() -> None:
    app = EricApp(FakeLink(), start="models")
    async with app.run_test(size=(120, 80)) as pilot:
        await pilot.pause()
        await pilot.press("question_mark")
        await pilot.pause()
        seen = "\n".join(rows(app))
        order = [seen.index(words) for words in ("This panel", "This screen", "Everywhere")]
        assert order == sorted(order)


async def test_a_click_on_the_key_row_does_what_it_says() -> None:
    app = EricApp(FakeLink(), start="settings")
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.pause()
        await pilot.click(KeyRow, offset=(rows(app)[-1].index("Help"), 0))
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


async def test_keys_are_told_from_words_by_their_colour() -> None:
    app = EricApp(FakeLink(), start="settings", theme="ericllm-contrast")
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, lambda: "? Help" in rows(app)[-1])
        colours = {
            segment.text.strip(): segment.style for segment in list(app.screen._compositor.render_strips(app.size))[-1]
        }
        key, words = colours["?"], colours["Help"]
        assert key is not None
        assert words is not None
        assert key.color != words.color


@pytest.mark.parametrize("mode", [mode.name for mode in modes.MODES if mode.name != "chat"])
async def test_the_key_row_shows_help_and_quit_in_80_columns(mode: str) -> None:
    app = EricApp(FakeLink(), start=mode)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "? Help" in rows(app)[-1])
        assert "q Quit" in rows(app)[-1]
        assert "^p palette" in rows(app)[-1]


async def test_keys_that_would_be_typed_are_not_offered_while_typing() -> None:
    app = EricApp(FakeLink(), start="chat")
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, lambda: "Send" in rows(app)[-1])
        assert "Prompts" not in rows(app)[-1]
        assert "Quit" not in rows(app)[-1]


def test_every_owner_is_found_and_dialogs_cover_the_keys_of_the_console() -> None:
    found = set(binding_owners())
    assert HelpScreen in found
    assert not can_conflict(None, HelpScreen)
    assert all(can_conflict(None, type(mode.factory())) for mode in modes.MODES)


@pytest.mark.parametrize("mode", [mode.name for mode in MODES if mode.name != "chat"])
async def test_d_drains_and_resumes_on_every_screen(mode: str) -> None:
    link = FakeLink(scenes.cpu_idle(), api=ApiStatus())
    app = EricApp(link, start=mode)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.current_mode == mode)
        await pilot.pause()
        for _ in range(2):
            await pilot.press("D")
            await app.workers.wait_for_complete()
            app.refresh_screen()
            await pilot.pause()
    assert link.names() == ["drain", "resume"]
