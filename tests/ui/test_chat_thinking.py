"""Thinking in Chat: folded above its answer, unfolded by key and click, kept, continued, exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Select, TextArea

from console.chats import ChatSettings, ChatStore, OpenChat, Turn, TurnNote
from console.chats.conversation import AnswerStream
from console.chats.export import from_json
from console.tui.screens.chat import pane
from console.tui.screens.chat.prose import Prose
from console.tui.screens.chat.settings import ChatSettingsScreen
from console.tui.screens.chat.turn import Answer, BranchPosition, ThinkingLine
from engine.backends.base import FinishReason
from engine.errors import InvalidRequest
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, asked, console, ended, foot, last_turn, opened
from tests.ui.seen import rows, screen_text, toasts, until

pytestmark = pytest.mark.long

THOUGHT = "They ask about the batch. Weights are read once per step, whatever its size."


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes, the model thinks for no time."""
    monkeypatch.setattr(pane, "AnswerStream", partial(AnswerStream, clock=lambda: 0.0))


def thinking(answer: str = "Yes.", thought: str = THOUGHT) -> FakeLink:
    """A link to a model that thinks before it answers."""
    link = FakeLink(answer=answer)
    link.conversation.thinking = thought
    return link


def fill_thinking(chats: Path, content: str, *, finish: FinishReason = "stop", thought: str = THOUGHT) -> None:
    """Keep a conversation whose answer has 12 seconds of thinking."""
    store = ChatStore(chats)
    chat = OpenChat(store, None, ChatSettings())
    chat.ask("Why does a bigger batch give more tokens per second?")
    turn = chat.begin_answer(chat.branches[0], "Qwen3-8B")
    note = TurnNote(
        model="Qwen3-8B", output_tokens=640, tokens_per_s=52.1, ttft_s=0.081, thinking_s=12.3, finish=finish
    )
    chat.keep(msgspec.structs.replace(turn, content=content, thinking=thought, note=note, unfinished=False))
    store.close()


async def click_on(pilot: Pilot[None], text: str) -> None:
    line = next(at for at, row in enumerate(rows(pilot.app)) if text in row)
    await pilot.click(offset=(rows(pilot.app)[line].index(text), line))


async def test_thinking_is_folded_until_its_key_or_a_click_unfolds_it(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill_thinking(chats, "Because.")
    async with console(FakeLink(), chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "▸ Thought for 12 s" in screen_text(pilot.app))
        assert "Weights are read" not in screen_text(pilot.app)
        await pilot.press("alt+u")
        await until(pilot, lambda: "▾ Thought for 12 s" in screen_text(pilot.app))
        assert "Weights are read" in screen_text(pilot.app)
        await click_on(pilot, "▾ Thought")
        await until(pilot, lambda: "▸ Thought for 12 s" in screen_text(pilot.app))
        assert "Weights are read" not in screen_text(pilot.app)
        await click_on(pilot, "▸ Thought")
        await until(pilot, lambda: "Weights are read" in screen_text(pilot.app))


@pytest.mark.usefixtures("no_time_passes")
async def test_thinking_shows_its_time_while_it_goes_on_and_can_be_read_as_it_comes() -> None:
    link = thinking(thought="one two")
    async with console(link).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        link.hold("chat")
        await ask(pilot, "Q")
        await until(pilot, lambda: bool(link.chats))
        link.step("chat")
        await until(pilot, lambda: "◌ Thinking… 0 s" in screen_text(pilot.app))
        await pilot.press("alt+u")
        await until(pilot, lambda: "▾ Thinking…" in screen_text(pilot.app) and "  one" in screen_text(pilot.app))
        link.step("chat")
        await until(pilot, lambda: "one two" in screen_text(pilot.app))
        link.release("chat")
        await until(pilot, lambda: answers(pilot) == ["Yes."] and ended(pilot))
        await until(pilot, lambda: "▾ Thought for less than 1 s" in screen_text(pilot.app))


async def test_the_key_is_offered_only_where_there_is_thinking() -> None:
    link = thinking()
    link.conversation.thinking = ""
    app = console(link)
    async with app.run_test(size=(160, 30), notifications=True) as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        assert "Thinking" not in rows(app)[-1]
        await pilot.press("alt+u")
        await until(pilot, lambda: toasts(app) == ["No thinking before this answer."])
        link.conversation.thinking = THOUGHT
        await asked(pilot, "Q")
        await until(pilot, lambda: "Thinking" in rows(app)[-1])


async def test_thinking_is_kept_sent_back_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, chats = thinking(), tmp_path / "chats.db"
    copied: list[str] = []

    async def copy(_: object, text: str) -> bool:
        copied.append(text)
        return True

    monkeypatch.setattr("console.tui.screens.chat.screen.copy", copy)
    async with console(link, chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: copied == ["Yes."])
        await asked(pilot, "And?")
        assert [message.thinking for message in link.chats[1][0]] == ["", THOUGHT, ""]
    assert (last_turn(chats).content, last_turn(chats).thinking) == ("Yes.", THOUGHT)


@pytest.mark.usefixtures("no_time_passes")
async def test_an_answer_stopped_inside_its_thinking_goes_on_there(tmp_path: Path) -> None:
    link, chats = thinking(thought="and weights."), tmp_path / "chats.db"
    fill_thinking(chats, "", finish="cancelled", thought="They ask about the batch ")
    async with console(link, chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "[continue]" in foot(pilot))
        await pilot.press("alt+c")
        await until(pilot, lambda: answers(pilot) == ["Yes."] and ended(pilot))
        [messages] = link.conversation.continued
        assert (messages[-1].content, messages[-1].thinking) == ("", "They ask about the batch")
        await until(pilot, lambda: "▸ Thought for 12 s" in screen_text(pilot.app))
    assert last_turn(chats).thinking == "They ask about the batch and weights."


async def test_thinking_that_cannot_be_continued_is_answered_again_as_a_branch(tmp_path: Path) -> None:
    link, chats = FakeLink(answer="Yes."), tmp_path / "chats.db"
    fill_thinking(chats, "", finish="cancelled")
    link.failures["chat"] = InvalidRequest("the last message cannot be continued: it has thinking alone")
    async with console(link, chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        await until(pilot, lambda: "[continue]" in foot(pilot))
        await pilot.press("alt+c")
        await until(pilot, lambda: answers(pilot) == ["Yes."] and ended(pilot) and "‹ 2/2 ›" in foot(pilot))
        await pilot.press("escape", "left")
        await until(pilot, lambda: answers(pilot) == [""] and "stopped" in foot(pilot))
        assert "▸ Thought for 12 s" in screen_text(pilot.app)


async def test_stopping_inside_the_thinking_keeps_it_and_regenerating_makes_a_branch(tmp_path: Path) -> None:
    link, chats = thinking(thought="one two"), tmp_path / "chats.db"
    async with console(link, chats).run_test(size=(120, 30)) as pilot:
        await opened(pilot)
        link.hold("chat")
        await ask(pilot, "Q")
        await until(pilot, lambda: bool(link.chats))
        link.step("chat")
        await until(pilot, lambda: "Thinking…" in screen_text(pilot.app))
        await pilot.press("escape")
        await until(pilot, lambda: "stopped" in foot(pilot))
        assert (last_turn(chats).content, last_turn(chats).thinking) == ("", "one")
        link.release("chat")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: answers(pilot) == ["Yes."] and "‹ 2/2 ›" in foot(pilot))


async def test_an_exported_conversation_has_the_thinking_and_brings_it_back(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill_thinking(chats, "Because.")
    app = console(FakeLink(), chats)
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        await opened(pilot)
        for number, key in enumerate(("alt+w", "alt+shift+w"), start=1):
            await pilot.press(key, "enter")
            await until(pilot, lambda number=number: len(toasts(app)) == number)  # type: ignore[misc]
        [markdown, json] = sorted((tmp_path / "data" / "ericllm" / "exports").iterdir(), reverse=True)
    folded = f"<details><summary>Thought for 12 s</summary>\n\n{THOUGHT}\n\n</details>\n\nBecause.\n"
    assert markdown.read_text().endswith(f"## Qwen3-8B\n\n{folded}")
    assert from_json(json.read_bytes()).turns[1].thinking == THOUGHT


@pytest.mark.parametrize(("chosen", "sent"), [("On", True), ("Off", False)])
async def test_thinking_is_switched_in_the_settings(chosen: str, sent: bool) -> None:
    link = thinking()
    async with console(link).run_test(size=(100, 32)) as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
        pilot.app.screen.query_one("#thinking", Select).value = chosen
        await until(pilot, lambda: chosen in screen_text(pilot.app))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: not isinstance(pilot.app.screen, ChatSettingsScreen))
        await asked(pilot, "Q")
        assert link.conversation.enabled == [None, sent]


async def unfolded(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await until(pilot, lambda: "Thought for 12 s" in screen_text(pilot.app))
    await pilot.press("alt+u")
    await until(pilot, lambda: "Weights are read" in screen_text(pilot.app))
    await until(pilot, lambda: " of 8,192" in screen_text(pilot.app))
    await pilot.pause()


def test_unfolded_thinking_looks_right(snap_compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextArea, "cursor_blink", False)
    chats = tmp_path / "chats.db"
    fill_thinking(chats, "Because the **weights** are read once for all of them.")
    assert snap_compare(console(FakeLink(), chats), terminal_size=(80, 24), run_before=unfolded)


class Streams:
    """An answer in view, whose thinking is folded."""

    follows = True

    def is_unfolded(self, turn_id: int) -> bool:
        """No."""
        return False


@pytest.mark.parametrize(("content", "ends"), [("Yes, once.", False), ("Yes, once.", True), ("", True)])
@pytest.mark.parametrize("late", ["on_mount", "_write"])
async def test_what_comes_while_an_answer_is_being_mounted_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, late: str, content: str, ends: bool
) -> None:
    begun = Turn(id=1, role="assistant", content=content[:3], thinking="" if content else "one two", unfinished=True)
    grown = msgspec.structs.replace(begun, content=content, thinking="one two", unfinished=not ends)
    goes_on = getattr(Answer, late)

    def after_growing(answer: Answer) -> object:
        (answer.finish if ends else answer.grow)(grown)
        return goes_on(answer)

    monkeypatch.setattr(Answer, late, after_growing)
    app = console(FakeLink())
    async with app.run_test(size=(120, 30)) as pilot:
        answer = Answer(begun, BranchPosition(), Streams())
        await app.screen.mount(answer)
        prose = answer.query_one("Prose.answer", Prose)
        await until(pilot, lambda: prose.source == content and bool(answer.query(ThinkingLine)))
        await until(pilot, lambda: "Thinking…" not in str(answer.query_one(ThinkingLine).render()))
