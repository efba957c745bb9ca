"""Conversations survive, in order, with their settings and numbers."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from console.chats import ChatSettings, ChatStore, ChatStoreError, Turn, TurnNote


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    return ChatStore(tmp_path / "data" / "chats.db")


def test_a_conversation_is_there_after_the_program_ends(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    settings = ChatSettings(system_prompt="Be brief.", temperature=0.2)
    note = TurnNote(model="demo", output_tokens=3, tokens_per_s=41.5, ttft_s=0.08, finish="stop")
    first = ChatStore(path)
    chat = first.create(settings)
    first.append(chat, Turn(role="user", content="What is TTFT?"))
    first.append(chat, Turn(role="assistant", content="Time to first token.", note=note))
    first.close()
    again = ChatStore(path)
    (kept,) = again.conversations()
    assert (kept.id, kept.title, kept.settings) == (chat, "What is TTFT?", settings)
    assert [turn.content for turn in again.turns(chat)] == ["What is TTFT?", "Time to first token."]
    assert again.turns(chat)[1].note == note


def test_the_conversation_that_changed_last_comes_first(store: ChatStore) -> None:
    old, new = store.create(ChatSettings()), store.create(ChatSettings())
    store.append(old, Turn(role="user", content="again"))
    assert [chat.id for chat in store.conversations()] == [old, new]


def test_the_first_question_is_the_title_and_a_long_one_is_cut(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    store.append(chat, Turn(role="user", content="How \n many " + "words " * 40))
    store.append(chat, Turn(role="user", content="second"))
    title = store.conversations()[0].title
    assert title.startswith("How many words")
    assert title.endswith("…")
    assert len(title) <= 48


def test_dropping_the_last_answer_leaves_the_question(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    store.append(chat, Turn(role="user", content="q"))
    store.append(chat, Turn(role="assistant", content="a"))
    store.drop_last_answer(chat)
    store.drop_last_answer(chat)
    assert [turn.content for turn in store.turns(chat)] == ["q"]


def test_deleting_takes_the_turns_along(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    store.append(chat, Turn(role="user", content="q"))
    store.delete(chat)
    assert store.conversations() == []
    assert store.turns(chat) == []


def test_settings_and_title_can_be_changed(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    store.set_settings(chat, ChatSettings(max_tokens=7))
    store.rename(chat, " Tuning ")
    kept = store.conversations()[0]
    assert (kept.title, kept.settings.max_tokens) == ("Tuning", 7)


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    path.write_text("not a database at all, but long enough to be read as one" * 40)
    with pytest.raises(ChatStoreError, match="cannot be kept"):
        ChatStore(path)


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ChatStoreError, match="newer version"):
        ChatStore(path)
