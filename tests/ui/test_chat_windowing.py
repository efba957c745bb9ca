"""Long conversations: a bounded number of widgets, whatever the length, and a view that stays where its reader is."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.chats import ChatSettings, ChatStore
from console.tui.screens.chat.prose import Prose
from console.tui.screens.chat.transcript import (
    ChatTranscript,
    TurnWindow,
    WindowLimits,
    limits_for,
    window_after,
    window_before,
    window_beginning,
    window_ending,
)
from console.tui.screens.chat.turn import Answer
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, console, ended, opened, panes
from tests.ui.seen import until

pytestmark = pytest.mark.long

TURNS = 500
WORDS = 400
MOST_WIDGETS = 400


@pytest.fixture(scope="module")
def long_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 words in 500 turns."""
    path = tmp_path_factory.mktemp("long") / "chats.db"
    store = ChatStore(path)
    chat = store.create(ChatSettings())
    leaf = None
    store._db.execute("PRAGMA synchronous = OFF")
    for number in range(TURNS // 2):
        leaf = store.add(chat, leaf, "user", f"question {number}").id
        text = f"answer {number}\n\n" + "\n\n".join(" ".join(["word"] * 40) for _ in range(WORDS // 40))
        leaf = store.add(chat, leaf, "assistant", text).id
    store.show(chat, leaf)
    store.close()
    return path


def widgets(view: ChatTranscript) -> int:
    return len(list(view.walk_children()))


async def test_a_long_conversation_mounts_a_bounded_number_of_widgets_from_end_to_start(long_chat: Path) -> None:
    async with console(FakeLink(), long_chat).run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: bool(answers(pilot)))
        view = panes(pilot)[0]
        assert answers(pilot)[-1].startswith(f"answer {TURNS // 2 - 1}")
        assert widgets(view) < MOST_WIDGETS
        view.focus()
        await pilot.press("home")
        await until(pilot, lambda: answers(pilot)[0].startswith("answer 0"))
        assert widgets(view) < MOST_WIDGETS
        await pilot.press("end")
        await until(pilot, lambda: answers(pilot)[-1].startswith(f"answer {TURNS // 2 - 1}"))
        assert widgets(view) < MOST_WIDGETS


async def test_scrolling_up_goes_on_beyond_the_window_and_what_is_read_stays_where_it_is(long_chat: Path) -> None:
    async with console(FakeLink(), long_chat).run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: bool(answers(pilot)))
        view = panes(pilot)[0]
        await until(pilot, lambda: view.max_scroll_y > 0 and view.scroll_y == view.max_scroll_y)
        first = view.turn_widgets()[0].turn.id
        view.focus()
        view.scroll_to(y=1, animate=False, immediate=True)
        await pilot.pause()
        at_top = view.turn_widgets()[0]
        row = at_top.region.y
        view.scroll_to(y=0, animate=False, immediate=True)
        await until(pilot, lambda: view.turn_widgets()[0].turn.id < first and not view._sliding)
        await pilot.pause()
        assert at_top.region.y == row + 1
        assert view.scroll_y > 0
        assert widgets(view) < MOST_WIDGETS


async def test_a_question_asked_from_far_above_shows_the_end(long_chat: Path) -> None:
    link = FakeLink(answer="the end")
    link.conversation.context = 10**6
    async with console(link, long_chat).run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: bool(answers(pilot)))
        view = panes(pilot)[0]
        view.focus()
        await pilot.press("home")
        await until(pilot, lambda: answers(pilot)[0].startswith("answer 0"))
        await ask(pilot, "And now?")
        await until(pilot, lambda: answers(pilot)[-1] == "the end" and ended(pilot))
        await until(pilot, lambda: view.scroll_y == view.max_scroll_y)
        assert len(link.chats[0][0]) == TURNS + 1


async def test_nothing_is_written_while_the_reader_is_elsewhere_and_all_of_it_when_he_is_back() -> None:
    link = FakeLink(answer="\n\n".join(["line"] * 60))
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Long")
        await until(pilot, lambda: ended(pilot))
        view = panes(pilot)[0]
        await until(pilot, lambda: view.max_scroll_y > 0 and view.scroll_y == view.max_scroll_y)
        link.answer = "one two three four"
        link.hold("chat")
        await ask(pilot, "And?")
        await until(pilot, lambda: len(answers(pilot)) == 2)
        view.focus()
        await pilot.press("home")
        await until(pilot, lambda: view.scroll_y == 0)
        await until(pilot, lambda: len(link.chats) == 2)
        link.step("chat")
        await until(pilot, lambda: answers(pilot)[-1] == "one")
        await pilot.pause(0.3)
        written = list(pilot.app.screen.query(Answer))[-1].query_one(Prose)
        assert written.source == ""
        await pilot.press("end")
        await until(pilot, lambda: written.source == "one")
        link.release("chat")
        await until(pilot, lambda: ended(pilot))
        await until(pilot, lambda: written.source == "one two three four")


def test_a_window_holds_as_many_turns_as_its_limits_allow() -> None:
    limits = WindowLimits(turns=3, characters=100)
    assert window_ending([10] * 9, 9, limits) == TurnWindow(6, 9)
    assert window_ending([10, 60, 60], 3, limits) == TurnWindow(2, 3)
    assert window_ending([500], 1, limits) == TurnWindow(0, 1)
    assert window_ending([], 0, limits) == TurnWindow(0, 0)
    assert window_beginning([10] * 9, 2, limits) == TurnWindow(2, 5)
    assert window_beginning([10] * 9, 8, limits) == TurnWindow(8, 9)
    assert window_beginning([500, 500], 0, limits) == TurnWindow(0, 1)


def test_a_window_that_moves_holds_what_is_seen_and_goes_on_where_turns_are_longer_than_its_limits() -> None:
    limits = WindowLimits(turns=4, characters=100)
    assert window_before([10] * 20, TurnWindow(9, 11), limits) == TurnWindow(7, 13)
    assert window_after([10] * 20, TurnWindow(9, 11), limits) == TurnWindow(7, 13)
    assert window_before([500] * 20, TurnWindow(9, 11), limits) == TurnWindow(7, 13)
    assert window_before([10] * 20, TurnWindow(1, 3), limits) == TurnWindow(0, 5)
    assert window_after([10] * 20, TurnWindow(18, 20), limits) == TurnWindow(16, 20)


def test_a_large_screen_gets_a_window_that_it_can_scroll_in() -> None:
    assert limits_for(80, 20) == WindowLimits(24, 6000)
    assert limits_for(200, 60) == WindowLimits(60, 36_000)
