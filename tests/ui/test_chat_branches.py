"""Branches: another answer, an edited question, a longer answer; what was there stays and can be walked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.chats import ChatSettings, ChatStore, OpenChat, TurnNote
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.prose import Prose
from console.tui.screens.chat.turn import Foot
from engine.backends.base import FinishReason
from engine.errors import QueueFull
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, asked, console, ended, fill, foot, kept, opened, panes, questions
from tests.ui.seen import rows, screen_text, toasts, until

pytestmark = pytest.mark.long


async def test_an_edited_question_is_asked_beside_the_old_one(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "first", "A", "second", "B")
    link = FakeLink(answer="C")
    async with console(link, chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await pilot.press("escape", *["shift+up"] * 4, "alt+e")
        box = pilot.app.screen.query_one(ChatInput)
        await until(pilot, lambda: box.has_focus and box.text == "first")
        await pilot.press(*" again", "enter")
        await until(pilot, lambda: answers(pilot) == ["C"] and ended(pilot))
        assert questions(pilot) == ["first again"]
        assert [message.content for message in link.chats[0][0]] == ["first again"]
        await pilot.press("escape", "shift+up", "shift+up", "left")
        await until(pilot, lambda: questions(pilot) == ["first", "second"])
        assert answers(pilot) == ["A", "B"]
    assert [turn.content for turn in kept(chats).all()] == ["first", "A", "second", "B", "first again", "C"]


async def test_escape_leaves_the_editing_of_a_question(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "first", "A")
    async with console(FakeLink(), chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await pilot.press("alt+e")
        await until(pilot, lambda: "Edit the question" in screen_text(pilot.app))
        await pilot.press("escape")
        box = pilot.app.screen.query_one(ChatInput)
        assert (box.text, box.editing) == ("", None)
        assert "Edit the question" not in screen_text(pilot.app)


async def test_branches_can_be_walked_by_clicking(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "Q", "one | two | three")
    async with console(FakeLink(), chats).run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        for glyph, shown, place in (("‹", "two", "2/3"), ("‹", "one", "1/3"), ("›", "two", "2/3")):
            line = next(at for at, row in enumerate(rows(pilot.app)) if "/3 ›" in row)
            await pilot.click(offset=(rows(pilot.app)[line].index(glyph), line))
            await until(pilot, lambda shown=shown: answers(pilot) == [shown])  # type: ignore[misc]
            assert f"‹ {place} ›" in foot(pilot)
    assert len(kept(chats)) == 4


async def test_at_the_last_branch_the_next_one_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "Q", "one | two")
    app = console(FakeLink(), chats)
    async with app.run_test(notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("alt+n")
        await until(pilot, lambda: len(toasts(app)) == 1)
        assert "No more branches" in toasts(app)[0]
        assert answers(pilot) == ["two"]


async def test_the_model_goes_on_with_its_own_answer(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "Q", "It is \n")
    link = FakeLink(answer="fast indeed")
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: answers(pilot) == ["It is fast indeed"] and ended(pilot))
        await until(pilot, lambda: pilot.app.screen.query_one(Prose).source == "It is fast indeed")
    assert [[(turn.role, turn.content) for turn in chat] for chat in link.conversation.continued] == [
        [("user", "Q"), ("assistant", "It is")]
    ]
    assert [turn.content for turn in kept(chats).all()] == ["Q", "It is fast indeed"]


@pytest.mark.parametrize(
    ("key", "words"), [("ctrl+t", "No answer to continue"), ("ctrl+r", "No question to regenerate")]
)
async def test_with_nothing_said_there_is_nothing_to_repeat_or_continue(key: str, words: str) -> None:
    app = console(FakeLink())
    async with app.run_test(notifications=True) as pilot:
        await opened(pilot)
        await pilot.press(key)
        await until(pilot, lambda: len(toasts(app)) == 1)
        assert words in toasts(app)[0]


@pytest.mark.parametrize("key", ["ctrl+t", "ctrl+r"])
async def test_without_a_model_nothing_is_repeated_or_continued(key: str, tmp_path: Path) -> None:
    fill(tmp_path / "chats.db", "Q", "A")
    app = console(FakeLink(scenes.empty()), tmp_path / "chats.db")
    async with app.run_test(notifications=True) as pilot:
        await opened(pilot)
        await pilot.press(key)
        await until(pilot, lambda: len(toasts(app)) == 1)
        assert "No model loaded" in toasts(app)[0]
        assert answers(pilot) == ["A"]


async def test_the_answer_in_the_middle_can_be_asked_again(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "first", "A", "second", "B")
    link = FakeLink(answer="other")
    async with console(link, chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await pilot.press("escape", *["alt+k"] * 3, "alt+r")
        await until(pilot, lambda: answers(pilot) == ["other"] and ended(pilot))
        assert [message.content for message in link.chats[0][0]] == ["first"]
        await pilot.press("left")
        await until(pilot, lambda: answers(pilot) == ["A", "B"])


async def test_an_answer_that_failed_before_its_first_word_leaves_no_branch(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(answer="now")
    link.failures["chat"] = QueueFull("The queue is full: 64 of 64", queued=64)
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: "queue is full" in foot(pilot))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["now"] and ended(pilot))
    assert [turn.content for turn in kept(chats).all()] == ["Q", "now"]


@pytest.mark.parametrize(
    ("text", "finish", "continues", "has_code"),
    [("A", "stop", False, False), ("A", "length", True, False), ("```\ncode\n```", "stop", False, True)],
)
async def test_continue_and_code_are_offered_where_they_do_something(
    tmp_path: Path, text: str, finish: FinishReason, continues: bool, has_code: bool
) -> None:
    chats = tmp_path / "chats.db"
    store = ChatStore(chats)
    chat = OpenChat(store, None, ChatSettings())
    chat.ask("Q")
    turn = chat.begin_answer(chat.branches[0], "demo")
    chat.keep(msgspec.structs.replace(turn, content=text, note=TurnNote(finish=finish), unfinished=False))
    store.close()
    async with console(FakeLink(), chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "[regenerate]" in foot(pilot))
        assert ("[continue]" in foot(pilot), "[code]" in foot(pilot)) == (continues, has_code)


async def test_actions_are_offered_beneath_the_last_turn_and_the_selected_one() -> None:
    link = FakeLink(answer="A")
    async with console(link).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await asked(pilot, "one")
        await asked(pilot, "two")
        feet = [str(each.content) for each in pilot.app.screen.query(Foot)]
        assert ["[regenerate]" in each for each in feet] == [False, False, False, True]
        await pilot.click(panes(pilot)[0].turn_widgets()[0])
        feet = [str(each.content) for each in pilot.app.screen.query(Foot)]
        assert feet[0] == "[edit]  [copy]  [delete]"
        row = next(at for at, line in enumerate(rows(pilot.app)) if "[edit]" in line)
        await pilot.click(offset=(rows(pilot.app)[row].index("edit"), row))
        await until(pilot, lambda: pilot.app.screen.query_one(ChatInput).text == "one")
