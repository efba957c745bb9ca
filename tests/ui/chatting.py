"""What tests of the chat screen share: opening it, asking, and what it shows then."""

from __future__ import annotations

from pathlib import Path

import msgspec
from textual.pilot import Pilot

from console.chats import ChatSettings, ChatStore, OpenChat, Tree, Turn, TurnNote
from console.tui.app import EricApp
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.transcript import ChatTranscript
from console.tui.screens.chat.turn import Answer, Foot, Question
from tests.fakes.link import FakeLink
from tests.ui.seen import until


def console(link: FakeLink, chats: Path | None = None, theme: str | None = None) -> EricApp:
    """The console on its chat screen."""
    return EricApp(link, start="chat", chats=chats, theme=theme)


async def opened(pilot: Pilot[None]) -> None:
    """The chat screen is there and the box has the focus."""
    await until(
        pilot, lambda: bool(pilot.app.screen.query(ChatInput)) and pilot.app.screen.query_one(ChatInput).has_focus
    )
    await pilot.pause()


async def ask(pilot: Pilot[None], question: str) -> None:
    """Put a question into the box and send it."""
    box = pilot.app.screen.query_one(ChatInput)
    box.focus()
    await pilot.pause()
    box.text = question
    await pilot.press("enter")


async def asked(pilot: Pilot[None], question: str) -> None:
    """Send a question and wait for all of the answers."""
    before = sum(len(answers(pilot, pane)) for pane in range(len(panes(pilot))))
    await ask(pilot, question)
    await until(
        pilot, lambda: sum(len(answers(pilot, at)) for at in range(len(panes(pilot)))) > before and ended(pilot)
    )
    await pilot.pause()


def panes(pilot: Pilot[None]) -> list[ChatTranscript]:
    """The transcripts, from left to right."""
    return list(pilot.app.screen.query(ChatTranscript))


def answers(pilot: Pilot[None], pane: int = 0) -> list[str]:
    """The answers shown."""
    return [answer.turn.content for answer in panes(pilot)[pane].query(Answer)]


def questions(pilot: Pilot[None], pane: int = 0) -> list[str]:
    """The questions shown."""
    return [question.turn.content for question in panes(pilot)[pane].query(Question)]


def foot(pilot: Pilot[None], pane: int = 0) -> str:
    """What stands beneath the last turn."""
    return str(panes(pilot)[pane].query(Foot).last().content)


def ended(pilot: Pilot[None]) -> bool:
    """There is an answer, and none is under way."""
    app = pilot.app
    return bool(answers(pilot)) and not any(worker.group == "answer" for worker in app.workers if worker.is_running)


def kept(chats: Path) -> Tree:
    """All turns of the conversation that changed last, as the file has them."""
    store = ChatStore(chats)
    tree = store.tree(store.conversations()[0].id)
    store.close()
    return tree


def last_turn(chats: Path) -> Turn:
    """What is kept at the end of the latest conversation."""
    store = ChatStore(chats)
    latest = store.conversations()[0]
    return store.tree(latest.id).path(latest.leaf)[-1]


def fill(chats: Path, *texts: str, others: tuple[str, ...] = (), settings: ChatSettings = ChatSettings()) -> None:  # noqa: B008
    """Keep conversations with one question each, then one of questions and answers in turn. "a | b" is two answers."""
    store = ChatStore(chats)
    for other in others:
        OpenChat(store, None, ChatSettings()).ask(other)
    chat = OpenChat(store, None, settings)
    note = TurnNote(model="NeuralHermes-7B", output_tokens=112, tokens_per_s=45.2, ttft_s=0.081, finish="stop")
    for at, text in enumerate(texts):
        if at % 2 == 0:
            chat.ask(text)
            continue
        for answer in text.split(" | "):
            chat.again(chat.branches[0])
            turn = chat.begin_answer(chat.branches[0], "NeuralHermes-7B")
            chat.keep(msgspec.structs.replace(turn, content=answer, note=note, unfinished=False))
    store.close()
