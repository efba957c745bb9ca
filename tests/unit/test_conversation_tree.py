"""A conversation is a tree: asking otherwise and answering again make branches, and nothing said is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from console.chats import Branch, ChatSettings, ChatStore, OpenChat, Turn, TurnNote
from console.chats.conversation import AnswerStream
from console.chats.export import code_blocks, export, file_name, from_json, read_into, to_json, to_markdown
from console.link.chat import ChatDelta, ChatMessage
from engine.errors import InvalidRequest, QueueFull


@pytest.fixture
def store() -> ChatStore:
    return ChatStore(None)


@pytest.fixture
def chat(store: ChatStore) -> OpenChat:
    return OpenChat(store, None, ChatSettings())


def answer(chat: OpenChat, text: str, branch: Branch | None = None) -> Turn:
    turn = chat.begin_answer(branch or chat.branches[0], "demo")
    turn = msgspec.structs.replace(turn, content=text, unfinished=False, note=TurnNote(model="demo", finish="stop"))
    chat.keep(turn)
    return turn


def said(chat: OpenChat, at: int = 0) -> list[str]:
    return [turn.content for turn in chat.path(chat.branches[at])]


def reopened(store: ChatStore, chat: OpenChat) -> OpenChat:
    assert chat.id is not None
    return OpenChat(store, store.conversation(chat.id), ChatSettings())


def test_another_answer_is_a_branch_beside_the_first_and_both_can_be_walked(store: ChatStore, chat: OpenChat) -> None:
    chat.ask("Q")
    first = answer(chat, "one")
    assert chat.again(chat.branches[0])
    second = answer(chat, "two")
    assert chat.tree.siblings(second.id) == [first.id, second.id]
    assert said(chat) == ["Q", "two"]
    assert chat.step(chat.branches[0], second.id, -1)
    assert said(chat) == ["Q", "one"]
    assert not chat.step(chat.branches[0], first.id, -1)
    assert said(reopened(store, chat)) == ["Q", "one"]


def test_an_edited_question_begins_a_branch_and_walking_back_shows_all_that_followed(chat: OpenChat) -> None:
    chat.ask("first")
    answer(chat, "A")
    chat.ask("more")
    answer(chat, "B")
    first = chat.path(chat.branches[0])[0]
    assert chat.edit(first, "otherwise") == [chat.branches[0]]
    answer(chat, "C")
    assert said(chat) == ["otherwise", "C"]
    chat.step(chat.branches[0], chat.path(chat.branches[0])[0].id, -1)
    assert said(chat) == ["first", "A", "more", "B"]


def test_side_by_side_a_question_is_one_turn_until_the_branches_part(store: ChatStore, chat: OpenChat) -> None:
    second = chat.split()
    chat.set_settings(second, ChatSettings(temperature=0.0, model="other"))
    chat.ask("Q")
    answer(chat, "left")
    answer(chat, "right", second)
    chat.ask("and?")
    assert (said(chat, 0), said(chat, 1)) == (["Q", "left", "and?"], ["Q", "right", "and?"])
    assert [turn.content for turn in chat.tree.all()] == ["Q", "left", "right", "and?", "and?"]
    again = reopened(store, chat)
    assert (said(again, 0), said(again, 1)) == (said(chat, 0), said(chat, 1))
    assert again.branches[1].settings.model == "other"


def test_a_question_edited_side_by_side_is_edited_wherever_it_was_asked(chat: OpenChat) -> None:
    second = chat.split()
    chat.ask("Q")
    answer(chat, "left")
    answer(chat, "right", second)
    chat.ask("and?")
    changed = chat.edit(chat.path(second)[2], "or?")
    assert changed == chat.branches
    assert (said(chat, 0), said(chat, 1)) == (["Q", "left", "or?"], ["Q", "right", "or?"])


def test_going_on_with_one_of_two_keeps_the_other_as_a_branch(store: ChatStore, chat: OpenChat) -> None:
    second = chat.split()
    chat.ask("Q")
    left = answer(chat, "left")
    right = answer(chat, "right", second)
    chat.join(second)
    assert said(reopened(store, chat)) == ["Q", "right"]
    assert chat.tree.siblings(right.id) == [left.id, right.id]


def test_an_answer_that_is_deleted_is_forgotten(store: ChatStore, chat: OpenChat) -> None:
    chat.ask("Q")
    chat.delete(chat.begin_answer(chat.branches[0], "demo"))
    assert said(reopened(store, chat)) == ["Q"]


def test_the_system_prompt_comes_before_the_turns_of_a_branch(store: ChatStore) -> None:
    chat = OpenChat(store, None, ChatSettings(system_prompt="Rhyme."))
    chat.ask("Q")
    assert [(message.role, message.content) for message in chat.messages(chat.branches[0])] == [
        ("system", "Rhyme."),
        ("user", "Q"),
    ]


async def deltas(
    *texts: str, finish: str | None = "stop", failure: Exception | None = None
) -> AsyncIterator[ChatDelta]:
    for number, text in enumerate(texts, start=1):
        last = finish if number == len(texts) else None
        yield ChatDelta(text=text, output_tokens=number, tokens_per_s=5.0, ttft_s=0.1, finish=last)  # type: ignore[arg-type]
    if failure is not None:
        raise failure


async def test_an_answer_is_shown_as_it_comes_and_kept_whole(store: ChatStore, chat: OpenChat) -> None:
    chat.ask("Q")
    shown: list[str] = []
    answering = AnswerStream(
        chat.begin_answer(chat.branches[0], "demo"), chat.keep, lambda turn: shown.append(turn.content)
    )
    await answering.run(deltas("one", " two"))
    kept = chat.path(chat.branches[0])[-1]
    assert shown == ["one", "one two"]
    assert (kept.content, kept.unfinished, kept.note.finish, kept.note.output_tokens) == ("one two", False, "stop", 2)
    assert reopened(store, chat).path(chat.branches[0])[-1] == kept


async def test_a_failed_answer_keeps_what_came_and_says_why(chat: OpenChat) -> None:
    chat.ask("Q")
    answering = AnswerStream(chat.begin_answer(chat.branches[0], "demo"), chat.keep, lambda turn: None)
    await answering.run(deltas("half", finish=None, failure=QueueFull("The queue is full")))
    note = answering.turn.note
    assert (answering.turn.content, note.finish, note.problem) == ("half", "error", "The queue is full")


async def test_going_on_adds_to_the_same_answer_and_to_its_tokens(chat: OpenChat) -> None:
    chat.ask("Q")
    stopped = answer(chat, "It is \n")
    chat.keep(msgspec.structs.replace(stopped, note=TurnNote(model="demo", output_tokens=2, finish="length")))
    turn = chat.resume_answer(chat.branches[0])
    assert turn is not None
    await (answering := AnswerStream(turn, chat.keep, lambda turn: None)).run(deltas(" fast", "."))
    assert (answering.turn.content, answering.turn.note.output_tokens) == ("It is fast.", 4)
    assert len(chat.tree) == 2


async def test_thinking_is_timed_until_the_answer_begins_and_goes_on_where_it_was_stopped(
    store: ChatStore, chat: OpenChat
) -> None:
    chat.ask("Q")
    now = 10.0

    def clock() -> float:
        return now

    async def answering(*pieces: tuple[str, str, float]) -> AsyncIterator[ChatDelta]:
        nonlocal now
        for thinking, text, at in pieces:
            now = at
            yield ChatDelta(text=text, thinking=thinking, output_tokens=1)

    stream = AnswerStream(chat.begin_answer(chat.branches[0], "demo"), chat.keep, lambda turn: None, clock)
    await stream.run(answering(("Is it", "", 10.0), (" noon ", "", 14.0)))
    assert (stream.turn.thinking, stream.turn.note.thinking_s, stream.turn.note.finish) == (
        "Is it noon ",
        4.0,
        "cancelled",
    )
    resumed = chat.resume_answer(chat.branches[0])
    assert resumed is not None
    assert chat.messages(chat.branches[0])[-1] == ChatMessage(role="assistant", content="", thinking="Is it noon")
    stream = AnswerStream(resumed, chat.keep, lambda turn: None, clock)
    await stream.run(answering(("?", "", 20.0), ("", "Yes", 23.0), ("", ".", 30.0)))
    kept = reopened(store, chat).path(chat.branches[0])[-1]
    assert (kept.thinking, kept.content, kept.note.thinking_s) == ("Is it noon?", "Yes.", 7.0)


def test_there_is_nothing_to_go_on_with_after_a_question(chat: OpenChat) -> None:
    chat.ask("Q")
    assert chat.resume_answer(chat.branches[0]) is None


def test_json_of_a_conversation_reads_back_as_the_same(store: ChatStore, chat: OpenChat) -> None:
    chat.set_settings(chat.branches[0], ChatSettings(system_prompt="Ä", temperature=0.5))
    chat.ask("Q **bold** \n[x]")
    answer(chat, "```py\nprint('é')\n```")
    chat.again(chat.branches[0])
    answer(chat, "two")
    assert chat.id is not None
    kept = store.conversation(chat.id)
    assert kept is not None
    exported = export(kept, chat.tree)
    other = ChatStore(None)
    other.create(ChatSettings())
    other.add(1, None, "user", "so that ids differ")
    copy = other.conversation(read_into(other, from_json(to_json(exported))))
    assert copy is not None
    assert export(copy, other.tree(copy.id)) == exported
    assert [turn.content for turn in other.tree(copy.id).path(copy.leaf)] == ["Q **bold** \n[x]", "two"]


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b'{"format": "other"}',
        b'{"format":"ericllm-chat","version":2,"title":"","settings":{},"shown":null,"turns":[]}',
        b'{"format":"ericllm-chat","version":1,"title":"","settings":{},"shown":null,'
        b'"turns":[{"id":1,"parent":2,"role":"user","content":""}]}',
        b'{"x":' * 100_000,
        b'{"format":"\xff"}',
        b'{"format":"ericllm-chat","version":1,"title":"\\ud800"}',
        b'{"format":"' + b"x" * 10_000 + b'"}',
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_a_file_that_is_no_export_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not an exported conversation") as refused:
        from_json(data)
    assert len(str(refused.value)) < 300


def test_markdown_has_the_branch_shown_with_who_said_it(chat: OpenChat) -> None:
    chat.ask("Why?")
    answer(chat, "Because.")
    text = to_markdown("Reasons", ChatSettings(system_prompt="Be\nbrief."), chat.path(chat.branches[0]))
    assert text == "# Reasons\n\n> Be\n> brief.\n\n## You\n\nWhy?\n\n## demo\n\nBecause.\n"


def test_an_export_is_named_after_the_title() -> None:
    assert file_name("What is a KV-page?", "md") == "what-is-a-kv-page.md"
    assert file_name("???", "json") == "conversation.json"


def test_code_blocks_are_taken_from_the_source() -> None:
    text = "Look:\n\n```python\nif x:\n    y()\n```\n\nand\n\n1. in a list\n\n   ```\n   z\n   ```\n\n```sh\nunfinished"
    assert code_blocks(text) == ["if x:\n    y()\n", "z\n", "unfinished"]
