"""The chat screen: ask, read, stop, ask again, keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from console.chats import ChatStore, Turn
from console.tui.app import EricApp
from console.tui.screens.chat.conversation_list import ChatList
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.prose import Prose
from console.tui.screens.chat.settings import ChatSettingsScreen
from console.tui.screens.chat.transcript import ChatTranscript
from console.tui.screens.chat.turn import Answer, Foot, Question, note_line
from engine.errors import QueueFull
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, until


def console(link: FakeLink, chats: Path | None = None) -> EricApp:
    return EricApp(link, start="chat", chats=chats)


def foot(pilot: Pilot[None]) -> str:
    """What stands beneath the last turn."""
    return str(pilot.app.screen.query(Foot).last().content)


async def opened(pilot: Pilot[None]) -> None:
    await until(
        pilot, lambda: bool(pilot.app.screen.query(ChatInput)) and pilot.app.screen.query_one(ChatInput).has_focus
    )


async def ask(pilot: Pilot[None], question: str) -> None:
    pilot.app.screen.query_one(ChatInput).text = question
    await pilot.press("enter")


def answers(pilot: Pilot[None]) -> list[str]:
    return [answer.turn.content for answer in pilot.app.screen.query(Answer)]


def last_turn(chats: Path) -> Turn:
    """What is kept at the end of the latest conversation."""
    store = ChatStore(chats)
    kept = store.conversations()[0]
    return store.tree(kept.id).path(kept.leaf)[-1]


def ended(pilot: Pilot[None]) -> bool:
    app = pilot.app
    return bool(answers(pilot)) and not any(worker.group == "answer" for worker in app.workers if worker.is_running)


async def test_an_answer_streams_in_with_its_speed_beneath() -> None:
    link = FakeLink(answer="It is *fast*.")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "How fast?")
        await until(pilot, lambda: answers(pilot) == ["It is *fast*."] and ended(pilot))
        await pilot.pause()
        assert [question.turn.content for question in pilot.app.screen.query(Question)] == ["How fast?"]
        note = foot(pilot)
        assert "45 tok/s · TTFT 80 ms · 3 tokens" in note
        assert pilot.app.screen.query_one(Prose).source == "It is *fast*."


async def test_escape_stops_the_answer_and_keeps_what_came(tmp_path: Path) -> None:
    link = FakeLink(answer="one two three")
    chats = tmp_path / "chats.db"
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        link.hold("chat")
        await ask(pilot, "Count")
        for said in ("", "one", "one two"):
            await until(pilot, lambda said=said: bool(link.chats) and answers(pilot) == [said])  # type: ignore[misc]
            if said != "one two":
                link.step("chat")
        await until(pilot, lambda: "esc Stop" in rows(pilot.app)[-1])
        await pilot.press("escape")
        await until(pilot, lambda: "esc Stop" not in rows(pilot.app)[-1])
        await until(pilot, lambda: link.closed_chats == 1)
        await until(pilot, lambda: "stopped" in foot(pilot))
        assert answers(pilot) == ["one two"]
        assert pilot.app.screen.query_one(Prose).source == "one two"
    kept = last_turn(chats)
    assert (kept.content, kept.note.finish, kept.unfinished) == ("one two", "cancelled", False)


async def test_again_asks_the_same_and_both_answers_can_be_walked() -> None:
    link = FakeLink(answer="first")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: answers(pilot) == ["first"] and ended(pilot))
        link.answer = "second"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["second"] and ended(pilot))
        assert [[turn.content for turn in messages] for messages, _ in link.chats] == [["Q"], ["Q"]]
        await until(pilot, lambda: "‹ 2/2 ›" in foot(pilot))
        await pilot.press("escape", "left")
        await until(pilot, lambda: answers(pilot) == ["first"] and "‹ 1/2 ›" in foot(pilot))
        await pilot.press("right")
        await until(pilot, lambda: answers(pilot) == ["second"])


async def test_the_whole_conversation_and_the_system_prompt_are_sent() -> None:
    link = FakeLink(answer="A")
    async with console(link).run_test(size=(100, 32)) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
        await pilot.press(*"Short.")
        await pilot.press("tab", *"0.3", "ctrl+s")
        await until(pilot, lambda: not isinstance(pilot.app.screen, ChatSettingsScreen))
        await ask(pilot, "one")
        await until(pilot, lambda: answers(pilot) == ["A"] and ended(pilot))
        await ask(pilot, "two")
        await until(pilot, lambda: len(answers(pilot)) == 2 and ended(pilot))
        messages, params = link.chats[-1]
        assert [(turn.role, turn.content) for turn in messages] == [
            ("system", "Short."),
            ("user", "one"),
            ("assistant", "A"),
            ("user", "two"),
        ]
        assert params.temperature == 0.3


async def test_a_bad_sampling_value_is_named_and_the_dialog_stays() -> None:
    async with console(FakeLink()).run_test(size=(100, 32)) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
        await pilot.press("tab", *"hot", "ctrl+s")
        await pilot.pause()
        assert "Temperature is 'hot'" in str(pilot.app.screen.query_one("#problem", Static).content)


async def test_settings_left_empty_follow_the_model() -> None:
    link = FakeLink()
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: bool(link.chats))
        assert link.chats[0][1].temperature == link.sampling_defaults().temperature


async def test_a_question_without_a_model_stays_in_the_box() -> None:
    link = FakeLink(scenes.empty())
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Anyone?")
        await pilot.pause()
        assert pilot.app.screen.query_one(ChatInput).text == "Anyone?"
        assert link.chats == []


async def test_a_refused_question_says_why_and_can_be_asked_again() -> None:
    link = FakeLink(answer="now")
    link.failures["chat"] = QueueFull("The queue is full: 64 of 64", queued=64)
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: "queue is full" in foot(pilot))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["now"])


async def test_ctrl_j_makes_a_new_line_and_up_brings_the_last_question_back() -> None:
    link = FakeLink()
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await pilot.press("a", "ctrl+j", "b", "enter")
        await until(pilot, lambda: bool(link.chats))
        assert link.chats[0][0][-1].content == "a\nb"
        await until(pilot, lambda: ended(pilot))
        await pilot.press("up")
        assert pilot.app.screen.query_one(ChatInput).text == "a\nb"


async def test_conversations_are_there_when_the_console_opens_again(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(answer="kept")
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Remember me")
        await until(pilot, lambda: ended(pilot))
    async with console(FakeLink(), chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        assert answers(pilot) == ["kept"]
        assert pilot.app.screen.query_one(ChatList).option_count == 1


async def test_an_answer_cut_off_by_quitting_is_kept(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(answer="half an answer")
    async with console(link, chats).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Q")
        await until(pilot, lambda: bool(answers(pilot)) and answers(pilot)[0].startswith("half"))
    assert last_turn(chats).content.startswith("half")


async def test_a_new_conversation_starts_empty_and_the_old_one_can_be_deleted(tmp_path: Path) -> None:
    link = FakeLink(answer="A")
    async with console(link, tmp_path / "chats.db").run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await ask(pilot, "old")
        await until(pilot, lambda: ended(pilot))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: answers(pilot) == [])
        pilot.app.screen.query_one(ChatList).focus()
        await pilot.press("down", "delete")
        await pilot.pause()
        await pilot.press("y")
        await until(pilot, lambda: pilot.app.screen.query_one(ChatList).option_count == 0)


async def test_keys_are_taken_while_a_long_answer_streams() -> None:
    """Typing goes on between deltas: all keys arrive long before the last word does."""
    link = FakeLink(answer="```python\n" + "word\n" * 3000)
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Go on")
        await until(pilot, lambda: bool(answers(pilot)) and bool(answers(pilot)[0]))
        await pilot.press(*"typing")
        assert pilot.app.screen.query_one(ChatInput).text == "typing"


async def test_markdown_is_parsed_far_less_often_than_words_come(monkeypatch: pytest.MonkeyPatch) -> None:
    parses = 0
    append = Prose.append

    def counted(self: Prose, markdown: str) -> object:
        nonlocal parses
        parses += 1
        return append(self, markdown)

    monkeypatch.setattr(Prose, "append", counted)
    words = 400
    link = FakeLink(answer=" ".join(["word"] * words))
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Go on")
        await until(pilot, lambda: ended(pilot) and len(answers(pilot)[0].split()) == words)
    assert parses < words / 4


async def test_scrolling_up_holds_the_view_and_a_new_question_shows_the_end() -> None:
    link = FakeLink(answer="\n\n".join(["line"] * 60))
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await ask(pilot, "Long")
        await until(pilot, lambda: ended(pilot))
        view = pilot.app.screen.query_one(ChatTranscript)
        await until(pilot, lambda: view.max_scroll_y > 0 and view.scroll_y == view.max_scroll_y)
        view.focus()
        await pilot.press("home")
        await until(pilot, lambda: view.scroll_y == 0)
        link.answer = "short"
        await ask_from_box(pilot, "And now?")
        await until(pilot, lambda: len(answers(pilot)) == 2 and ended(pilot))
        await until(pilot, lambda: view.scroll_y == view.max_scroll_y)


async def ask_from_box(pilot: Pilot[None], question: str) -> None:
    pilot.app.screen.query_one(ChatInput).focus()
    await pilot.pause()
    await ask(pilot, question)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40)])
async def test_box_and_transcript_fit(size: tuple[int, int]) -> None:
    async with console(FakeLink()).run_test(size=size) as pilot:
        await opened(pilot)
        box, view = pilot.app.screen.query_one(ChatInput), pilot.app.screen.query_one(ChatTranscript)
        assert box.region.bottom <= size[1] - 1
        assert view.region.height >= 10
        assert view.region.width >= 60


def test_the_note_says_how_an_answer_ended() -> None:
    from console.chats import TurnNote

    note = TurnNote(output_tokens=1, ttft_s=0.012, finish="length")
    assert note_line(note) == "TTFT 12 ms · 1 token · cut off at max tokens"
