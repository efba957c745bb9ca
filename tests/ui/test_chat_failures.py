"""Questions that cannot be sent, answers that fail, and turns that are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from console.tui.screens.chat import screen
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.turn import Foot
from console.tui.screens.dialogs import ConfirmScreen
from engine.errors import ContextLengthExceeded, QueueFull
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, asked, console, ended, fill, foot, kept, opened, panes, questions
from tests.ui.seen import toasts, until

pytestmark = pytest.mark.long

FAILED = "The queue is full: 64 of 64"


class AlwaysTooLong(FakeLink):
    """No question fits."""

    async def wait(self, method: str) -> None:
        """Refuse to chat."""
        if method == "chat":
            raise ContextLengthExceeded("The prompt has 3,295 tokens, the limit is 2,048")
        await super().wait(method)


def draft(pilot: Pilot[None]) -> str:
    """What is in the box."""
    return pilot.app.screen.query_one(ChatInput).text


def said(pilot: Pilot[None]) -> list[str]:
    """The messages that were shown."""
    return toasts(pilot.app)


async def test_a_question_too_long_for_the_context_is_refused_before_it_is_sent_and_stays_in_the_box() -> None:
    link = FakeLink()
    link.conversation.context = 50
    async with console(link).run_test(notifications=True) as pilot:
        await opened(pilot)
        question = "word " * 60
        await ask(pilot, question)
        await until(pilot, lambda: bool(said(pilot)))
        assert "Too long: 64 tokens, limit 50" in said(pilot)[0]
        assert (draft(pilot), link.chats, questions(pilot)) == (question, [], [])


async def test_a_question_that_is_not_counted_in_time_comes_back_where_the_engine_finds_it_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(screen, "COUNT_PATIENCE_S", 0.0)
    link = FakeLink()
    link.hold("count_tokens")
    link.failures["chat"] = ContextLengthExceeded("The prompt has 3,295 tokens, the limit is 2,048")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Much too long")
        await until(pilot, lambda: "3,295 tokens" in foot(pilot))
        await until(pilot, lambda: draft(pilot) == "Much too long")


async def test_a_question_that_two_models_find_too_long_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "COUNT_PATIENCE_S", 0.0)
    link = AlwaysTooLong()
    link.hold("count_tokens")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await pilot.press("alt+v", "escape")
        await until(pilot, lambda: len(panes(pilot)) == 2 and not pilot.app.screen.is_modal)
        await ask(pilot, "Much too long")
        await until(pilot, lambda: all("3,295" in foot(pilot, pane) for pane in (0, 1)))
        await pilot.pause()
        assert draft(pilot) == "Much too long"


async def test_what_fits_is_sent_after_a_question_that_did_not() -> None:
    link = FakeLink(answer="yes")
    link.conversation.context = 50
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "word " * 60)
        await pilot.pause()
        await asked(pilot, "Short enough?")
        assert [message.content for message in link.chats[0][0]] == ["Short enough?"]
        assert (questions(pilot), answers(pilot)) == (["Short enough?"], ["yes"])


async def test_an_edited_question_too_long_stays_in_the_box_as_an_edit(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "one", "1")
    link = FakeLink()
    link.conversation.context = 50
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press("alt+e")
        await ask(pilot, "word " * 60)
        await pilot.pause()
        assert pilot.app.screen.query_one(ChatInput).editing is not None
        assert (questions(pilot), link.chats) == (["one"], [])


async def test_enter_pressed_twice_sends_once_while_the_question_is_being_counted() -> None:
    link = FakeLink(answer="once")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        link.hold("count_tokens")
        await ask(pilot, "Only once")
        await pilot.press("enter")
        link.release("count_tokens")
        await until(pilot, lambda: ended(pilot))
        await pilot.pause()
        assert questions(pilot) == ["Only once"]
        assert len(link.chats) == 1


async def test_a_question_whose_answer_failed_is_not_sent_with_the_next_one() -> None:
    link = FakeLink(answer="fine")
    link.failures["chat"] = ContextLengthExceeded("The prompt has 3,295 tokens, the limit is 2,048")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Failing")
        await until(pilot, lambda: "3,295 tokens" in foot(pilot))
        await asked(pilot, "Next")
        assert [message.content for message in link.chats[-1][0]] == ["Next"]


async def test_why_an_answer_failed_stays_beneath_its_question(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(answer="fine")
    link.failures["chat"] = QueueFull(FAILED, queued=64)
    async with console(link, chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await ask(pilot, "Failing")
        await until(pilot, lambda: FAILED in foot(pilot))
        await asked(pilot, "Next")
        assert any(FAILED in str(each.content) for each in pilot.app.screen.query(Foot))
    async with console(FakeLink(), chats).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        assert any(FAILED in str(each.content) for each in pilot.app.screen.query(Foot))


async def test_a_failed_answer_offers_nothing_to_continue_or_copy() -> None:
    link = FakeLink()
    link.failures["chat"] = QueueFull(FAILED, queued=64)
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: "[regenerate]" in foot(pilot))
        assert "[continue]" not in foot(pilot)
        assert "[code]" not in foot(pilot)
        assert "[delete]" in foot(pilot)


async def test_the_last_question_and_its_answer_are_deleted_after_a_question(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "one", "1", "two", "2 | zwei")
    async with console(FakeLink(), chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press("alt+d")
        await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
        await pilot.press("n", "alt+d")
        await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: bool(pilot.app.screen.query(ChatInput)) and questions(pilot) == ["one"])
        assert answers(pilot) == ["1"]
    assert [turn.content for turn in kept(chats).all()] == ["one", "1"]


async def test_a_selected_turn_is_deleted_with_what_follows_it(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "one", "1", "two", "2")
    async with console(FakeLink(), chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press("escape", *["shift+up"] * 3, "delete")
        await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: bool(pilot.app.screen.query(ChatInput)) and answers(pilot) == [])
        assert questions(pilot) == ["one"]
    assert [turn.content for turn in kept(chats).all()] == ["one"]


async def test_where_another_branch_is_left_it_is_shown_instead_of_the_deleted_one(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "one", "1 | eins")
    async with console(FakeLink(), chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press("escape", "shift+up", "delete")
        await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: bool(pilot.app.screen.query(ChatInput)) and answers(pilot) == ["1"])


async def test_with_nothing_said_there_is_nothing_to_delete() -> None:
    async with console(FakeLink()).run_test(notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("alt+d")
        await until(pilot, lambda: said(pilot) == ["No turn to delete."])
