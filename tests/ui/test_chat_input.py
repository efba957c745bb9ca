"""Typing in the chat: the box has the focus, and no letter ever means anything but itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.events import Key

from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.chat import screen
from console.tui.screens.chat.conversation_list import ChatList
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.transcript import ChatTranscript
from console.tui.screens.help import HelpScreen
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, asked, console, ended, fill, opened, questions
from tests.ui.seen import rows, screen_text, until

LETTERS = "What a? [] +- q m n I 123"
KEYS = {
    " ": "space",
    "?": "question_mark",
    "[": "left_square_bracket",
    "]": "right_square_bracket",
    "+": "plus",
    "-": "minus",
}


@pytest.fixture(autouse=True)
def counted_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question whose tokens are counted waits for that as long as a test has it wait."""
    monkeypatch.setattr(screen, "COUNT_PATIENCE_S", 60.0)


def keys(text: str) -> list[str]:
    """The keys that type `text`."""
    return [KEYS.get(character, character) for character in text]


def box(app: EricApp) -> ChatInput:
    return app.screen.query_one(ChatInput)


@pytest.mark.parametrize("leave", [[], ["escape"]], ids=["in the box", "after Esc"])
async def test_letters_are_typed_and_command_nothing(leave: list[str]) -> None:
    link = FakeLink()
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await pilot.press(*leave, *keys(LETTERS))
        await pilot.pause()
        assert box(app).text == LETTERS
        assert box(app).has_focus
        assert (link.commands, app.current_mode) == ([], "chat")


async def test_letters_go_to_the_box_from_the_list_of_conversations() -> None:
    link = FakeLink()
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await asked(pilot, "Hello")
        app.screen.query_one(ChatList).focus()
        await pilot.press(*keys("add a"))
        assert box(app).text == "add a"
        assert "stop_api" not in link.names()


async def test_coming_back_to_the_chat_focuses_the_box_whatever_was_left() -> None:
    link = FakeLink()
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await pilot.press("escape")
        assert app.screen.query_one(ChatTranscript).has_focus
        await pilot.press("f1", "f3")
        await until(pilot, lambda: box(app).has_focus)
        await pilot.press(*keys("What a"))
        assert box(app).text == "What a"
        assert link.commands == []


async def test_a_dialog_over_the_chat_gives_the_focus_back_to_where_it_was() -> None:
    app = console(FakeLink())
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await pilot.press("escape", "alt+h")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))
        await pilot.pause()
        assert app.screen.query_one(ChatTranscript).has_focus


async def test_what_is_pasted_outside_the_box_goes_into_it() -> None:
    from textual.events import Paste

    app = console(FakeLink())
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await pilot.press("escape")
        app.post_message(Paste("two\nlines"))
        await until(pilot, lambda: box(app).text == "two\nlines")


async def test_no_key_is_offered_that_would_be_typed() -> None:
    app = console(FakeLink())
    async with app.run_test(size=(140, 30)) as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        for leave in ((), ("escape",)):
            await pilot.press(*leave)
            await pilot.pause()
            assert "API" not in rows(app)[-1]
            assert "Quit" not in rows(app)[-1].replace("^q Quit", "")
        found = {entry.title: entry.keys for entry in entries(app.screen)}
        assert found["Show recent alerts"] == ""
        assert found["Copy the selected message, or the last answer"] == "^y or alt+y"


async def test_the_frame_of_the_box_says_whether_keys_type_or_act_on_the_conversation(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "one", "1")
    app = console(FakeLink(), chats)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert "Typing" in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: "Reading: arrows scroll" in screen_text(app))
        await pilot.press("x")
        await until(pilot, lambda: "Typing" in screen_text(app))
        await pilot.press("alt+e")
        await until(pilot, lambda: "Edit the question" in screen_text(app))


async def test_an_empty_chat_offers_to_send_and_nothing_that_needs_a_question_or_an_answer() -> None:
    app = console(FakeLink(answer="A"))
    async with app.run_test(size=(160, 40)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "Send" in rows(app)[-1])
        for label in ("Regenerate", "Continue", "Edit", "Copy"):
            assert label not in rows(app)[-1]
        await asked(pilot, "Q")
        await until(pilot, lambda: all(label in rows(app)[-1] for label in ("Regenerate", "Continue", "Edit", "Copy")))


async def test_without_a_model_there_is_nothing_to_send_and_enter_says_why() -> None:
    app = console(FakeLink(scenes.empty()))
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("x", "enter")
        await until(pilot, lambda: "No model loaded" in screen_text(app) and box(app).text == "x")
        assert "Send" not in rows(app)[-1]


def type_at_once(app: EricApp, text: str) -> None:
    """Send the keys as fast as a terminal that pastes them one by one."""
    for character in text:
        key = "enter" if character == "\n" else KEYS.get(character, character)
        app.post_message(Key(key, character))


@pytest.mark.parametrize("leave", [[], ["escape"]], ids=["in the box", "after Esc"])
async def test_fast_typing_keeps_its_order_and_enter_sends_all_that_was_typed_before_it(leave: list[str]) -> None:
    link = FakeLink(answer="Hi")
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await pilot.press(*leave)
        type_at_once(app, "hello there\nand more")
        await until(pilot, lambda: questions(pilot) == ["hello there"] and box(app).text == "and more")
        await until(pilot, lambda: answers(pilot) == ["Hi"] and ended(pilot))


async def test_what_is_typed_while_a_question_is_counted_stays_in_the_box() -> None:
    link = FakeLink(answer="Hi")
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        link.hold("count_tokens")
        type_at_once(app, "first\nsecond")
        await until(pilot, lambda: box(app).text == "second")
        link.release("count_tokens")
        await until(pilot, lambda: questions(pilot) == ["first"])
        assert box(app).text == "second"


async def test_two_questions_sent_while_the_first_is_counted_are_asked_one_after_the_other() -> None:
    link = FakeLink(answer="Hi")
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        link.hold("count_tokens")
        type_at_once(app, "first\nsecond\n")
        await until(pilot, lambda: len(link.conversation.counted) > 1 and not box(app).text)
        link.release("count_tokens")
        await until(pilot, lambda: questions(pilot) == ["first", "second"])


async def test_a_question_that_is_refused_comes_back_before_what_was_typed_since() -> None:
    link = FakeLink()
    link.conversation.context = 8
    app = console(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        link.hold("count_tokens")
        type_at_once(app, "a b c d e f g h i\nand more")
        await until(pilot, lambda: box(app).text == "and more")
        link.release("count_tokens")
        await until(pilot, lambda: box(app).text == "a b c d e f g h i\nand more")
