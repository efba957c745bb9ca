"""Dialogs: each shows its own keys in the last row, Enter accepts from a field, `?` explains the keys."""

from __future__ import annotations

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from console.tui.app import EricApp
from console.tui.binding_index import all_bindings, binding_owners
from console.tui.screens.base import Dialog
from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from console.tui.screens.help import HelpScreen
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, until


async def asked(pilot: Pilot[None]) -> list[bool | None]:
    """Ask a question over the Dashboard; its answer will be in the list."""
    answers: list[bool | None] = []
    pilot.app.push_screen(ConfirmScreen("Unload it?", "2 requests run.", yes="Unload", no="Keep"), answers.append)
    await until(pilot, lambda: "y Unload" in rows(pilot.app)[-1])
    return answers


async def typed(pilot: Pilot[None]) -> list[str | None]:
    """Ask for a line over the Dashboard."""
    answers: list[str | None] = []
    pilot.app.push_screen(LineScreen("Title", accept="Rename"), answers.append)
    await until(pilot, lambda: "⏎ OK" in rows(pilot.app)[-1])
    return answers


def test_every_dialog_has_the_row_of_keys() -> None:
    all_bindings()
    assert [each for each in binding_owners() if issubclass(each, ModalScreen) and not issubclass(each, Dialog)] == []


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_a_question_shows_its_keys_in_the_words_of_its_buttons_and_none_of_the_screen(
    size: tuple[int, int],
) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=size) as pilot:
        await asked(pilot)
        assert rows(app)[-1].split("  ")[:3] == [" y Unload", "n Keep", "? Help"]


async def test_enter_on_a_button_presses_it_and_accepts_nothing() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test() as pilot:
        answers = await asked(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: answers == [False])
        lines = await typed(pilot)
        await pilot.press(*"name")
        app.screen.query_one("#leave", Button).focus()
        await until(pilot, lambda: "⏎ OK" not in rows(app)[-1])
        await pilot.press("enter")
        await until(pilot, lambda: lines == [None])


async def test_enter_in_the_field_accepts_the_line() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test() as pilot:
        lines = await typed(pilot)
        await pilot.press("enter")
        assert lines == []
        await pilot.press(*"name", "enter")
        await until(pilot, lambda: lines == ["name"])


async def test_a_question_mark_explains_the_keys_of_a_dialog_and_comes_back_to_it() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(100, 40)) as pilot:
        answers = await asked(pilot)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen) and "This dialog" in screen_text(app))
        assert "Unload" in screen_text(app)
        assert "Everywhere" not in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert answers == []


async def test_a_question_mark_is_typed_where_a_line_is_typed() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test() as pilot:
        await typed(pilot)
        assert "? Help" not in rows(app)[-1]
        await pilot.press("question_mark")
        assert app.screen.query_one(Input).value == "?"


async def test_a_key_of_a_dialog_can_be_clicked() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test() as pilot:
        answers = await asked(pilot)
        await pilot.click(offset=(rows(app)[-1].index("Unload"), 23))
        await until(pilot, lambda: answers == [True])


async def test_enter_accepts_all_that_was_typed_before_it_however_fast() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test() as pilot:
        lines = await typed(pilot)
        for key in (*"a-long-name", "enter"):
            app.post_message(Key(key, key if len(key) == 1 else None))
        await until(pilot, lambda: lines == ["a-long-name"])
