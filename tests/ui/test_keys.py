"""Keys as data: ids, tooltips, and no key that means two things in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from textual.binding import Binding
from textual.screen import ModalScreen

from console import keymap, modes
from console.app import EricApp
from console.screens.adapters import AdaptersScreen
from console.screens.confirm import ConfirmScreen
from console.screens.help import HelpScreen
from console.screens.worker import WorkerScreen
from console.widgets.model_table import ModelTable
from console.widgets.table import Table
from tests.fakes.link import FakeLink
from tests.ui.seen import rows


def _own(bindings: object) -> Iterator[Binding]:
    yield from Binding.make_bindings(bindings)  # type: ignore[arg-type]


DIALOGS = [HelpScreen, ConfirmScreen, WorkerScreen, AdaptersScreen]
OWNERS = [*DIALOGS, Table, ModelTable, *(type(mode.factory()) for mode in modes.MODES)]


def test_every_binding_has_an_id_and_a_tooltip() -> None:
    for binding in (*_own(keymap.BINDINGS), *(b for owner in OWNERS for b in _own(owner.__dict__.get("BINDINGS", [])))):
        assert binding.id, binding
        assert binding.tooltip, binding


def test_no_key_is_bound_twice_in_one_place() -> None:
    for owner, bindings in (("app", keymap.BINDINGS), *((o.__name__, o.__dict__.get("BINDINGS", [])) for o in OWNERS)):
        keys = Counter(binding.key for binding in _own(bindings))
        assert [key for key, times in keys.items() if times > 1] == [], owner


def test_no_screen_takes_a_key_of_the_whole_console() -> None:
    everywhere = {binding.key for binding in _own(keymap.BINDINGS)}
    for owner in OWNERS:
        if issubclass(owner, ModalScreen):
            continue  # they cover the console: its keys sleep beneath them
        assert not everywhere & {binding.key for binding in _own(owner.__dict__.get("BINDINGS", []))}, owner


def test_no_binding_id_is_used_for_two_actions() -> None:
    actions: dict[str, set[str]] = {}
    for binding in (*_own(keymap.BINDINGS), *(b for owner in OWNERS for b in _own(owner.__dict__.get("BINDINGS", [])))):
        actions.setdefault(binding.id or "", set()).add(binding.action)
    assert {identity: found for identity, found in actions.items() if len(found) > 1} == {}


async def test_keys_can_be_remapped_by_id() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test() as pilot:
        app.set_keymap({"workers.more": "w"})
        await pilot.press("w")
        await app.workers.wait_for_complete()
    assert link.commands == [("reconfigure", {"workers": 3})]


@pytest.mark.parametrize("mode", ["dashboard", "models", "logs"])
async def test_the_footer_shows_help_and_quit_in_80_columns(mode: str) -> None:
    app = EricApp(FakeLink(), start=mode)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "? Help" in rows(app)[-1]
        assert "q Quit" in rows(app)[-1]
