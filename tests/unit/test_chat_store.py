"""Conversations survive: in order, with their branches, settings and numbers, whatever happens to the program."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from console.chats import ChatSettings, ChatStore, ChatStoreError, Preset, SecondBranch, Turn, TurnNote
from console.chats.presets import BUILTIN, all_presets, apply_preset, describe_settings

VERSION_1 = """
CREATE TABLE IF NOT EXISTS conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    settings BLOB NOT NULL,
    changed REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS turn (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversation(id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    note BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS turn_of_conversation ON turn(conversation, id);
PRAGMA user_version = 1;
"""

STREAMING = """
import asyncio, sys
from pathlib import Path
from console.chats import ChatSettings, ChatStore, OpenChat
from console.chats.conversation import AnswerStream
from console.link.chat import ChatDelta

async def words():
    for number in range(1, 10**6):
        yield ChatDelta(text=f"word{number} ", output_tokens=number, tokens_per_s=9.0)
        await asyncio.sleep(0.002)

def keep(turn):
    chat.keep(turn)
    if turn.content:
        print(turn.content, flush=True)

store = ChatStore(Path(sys.argv[1]))
chat = OpenChat(store, None, ChatSettings())
chat.ask("Count")
turn = chat.begin_answer(chat.branches[0], "demo")
asyncio.run(AnswerStream(turn, keep, lambda turn: None).run(words()))
"""


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    return ChatStore(tmp_path / "data" / "chats.db")


def say(store: ChatStore, chat: int, *texts: str) -> list[Turn]:
    """Questions and answers in turn, each after the one before."""
    turns: list[Turn] = []
    for at, text in enumerate(texts):
        parent = turns[-1].id if turns else None
        turns.append(store.add(chat, parent, "assistant" if at % 2 else "user", text))
    store.show(chat, turns[-1].id)
    return turns


def test_a_conversation_is_there_after_the_program_ends(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    settings = ChatSettings(system_prompt="Be brief.", temperature=0.2)
    note = TurnNote(model="demo", output_tokens=3, tokens_per_s=41.5, ttft_s=0.08, finish="stop")
    first = ChatStore(path)
    chat = first.create(settings)
    question = first.add(chat, None, "user", "What is TTFT?")
    answer = first.add(chat, question.id, "assistant", "Time to first token.", note=note)
    first.show(chat, answer.id, SecondBranch(settings=ChatSettings(seed=7), leaf=question.id))
    first.close()
    again = ChatStore(path)
    (kept,) = again.conversations()
    assert (kept.id, kept.title, kept.settings, kept.leaf) == (chat, "What is TTFT?", settings, answer.id)
    assert kept.beside == SecondBranch(settings=ChatSettings(seed=7), leaf=question.id)
    assert again.tree(chat).path(kept.leaf) == [question, answer]


def test_what_was_streamed_is_there_after_sigkill_and_marked_stopped(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with subprocess.Popen([sys.executable, "-c", STREAMING, str(path)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        kept = program.stdout.readline().strip()
        os.kill(program.pid, signal.SIGKILL)
    assert program.returncode == -signal.SIGKILL
    assert "word2" in kept
    store = ChatStore(path)
    (chat,) = store.conversations()
    question, answer = store.tree(chat.id).path(chat.leaf)
    assert question.content == "Count"
    assert answer.content.startswith(kept)
    assert (answer.unfinished, answer.note.finish, answer.note.model) == (False, "cancelled", "demo")
    assert answer.note.output_tokens == len(answer.content.split())


def test_a_version_1_file_becomes_a_tree_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
        db.execute("INSERT INTO conversation VALUES (1, 'one', '{\"temperature\":0.5}', 10.0), (2, 'two', '{}', 20.0)")
        db.executemany(
            "INSERT INTO turn (conversation, role, content, note) VALUES (?, ?, ?, ?)",
            [
                (1, "user", "a", b"{}"),
                (2, "user", "x", b"{}"),
                (1, "assistant", "b", b'{"model":"demo","output_tokens":3,"finish":"stop"}'),
                (1, "user", "c", b"{}"),
            ],
        )
    db.close()
    store = ChatStore(path)
    two, one = store.conversations()
    assert [turn.content for turn in store.tree(one.id).path(one.leaf)] == ["a", "b", "c"]
    assert [turn.content for turn in store.tree(two.id).path(two.leaf)] == ["x"]
    assert (one.title, one.changed, one.settings) == ("one", 10.0, ChatSettings(temperature=0.5))
    assert store.tree(one.id).all()[1].note == TurnNote(model="demo", output_tokens=3, finish="stop")
    store.keep_preset(Preset(name="mine", settings=ChatSettings()))
    assert store.problem == ""


def test_a_version_2_file_has_no_thinking_and_takes_some(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    before = ChatStore(path)
    chat = before.create(ChatSettings())
    say(before, chat, "Q", "A")
    before.close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE turn DROP COLUMN thinking")
        db.execute("PRAGMA user_version = 2")
    db.close()
    store = ChatStore(path)
    question, answer = store.tree(chat).all()
    assert (question.content, answer.content, answer.thinking) == ("Q", "A", "")
    added = store.add(chat, question.id, "assistant", "B", thinking="Hm.")
    assert store.tree(chat).get(added.id) == added


def test_a_file_of_a_newer_version_is_refused_in_one_sentence_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(ChatStoreError, match="newer version"):
        ChatStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    path.write_text("not a database at all, but long enough to be read as one" * 40)
    with pytest.raises(ChatStoreError, match="cannot be saved"):
        ChatStore(path)


def test_a_locked_file_is_read_and_what_comes_is_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first = ChatStore(path)
    say(first, first.create(ChatSettings()), "kept before", "yes")
    locking = sqlite3.connect(path, isolation_level=None)
    locking.execute("BEGIN IMMEDIATE")
    store = ChatStore(path)
    assert "database is locked" in store.problem
    say(store, store.create(ChatSettings()), "said in memory")
    assert {chat.title for chat in store.conversations()} == {"kept before", "said in memory"}
    locking.execute("ROLLBACK")
    assert [chat.title for chat in ChatStore(path).conversations()] == ["kept before"]


def test_a_file_that_is_locked_later_is_left_with_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    store = ChatStore(path)
    chat = store.create(ChatSettings())
    (question,) = say(store, chat, "Q")
    locking = sqlite3.connect(path, isolation_level=None)
    locking.execute("BEGIN IMMEDIATE")
    assert store.problem == ""
    store.add(chat, question.id, "assistant", "A")
    assert "database is locked" in store.problem
    assert [turn.content for turn in store.tree(chat).all()] == ["Q", "A"]


def test_a_file_that_breaks_meanwhile_is_one_sentence_and_new_conversations_are_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    store = ChatStore(path)
    say(store, store.create(ChatSettings()), "kept before")
    other = sqlite3.connect(path)
    other.execute("DROP TABLE preset")
    other.execute("DROP TABLE turn")
    other.commit()
    assert len(store.tree(1)) == 0
    assert "no such table" in store.problem
    say(store, store.create(ChatSettings()), "in memory")
    assert [chat.title for chat in store.conversations()] == ["in memory"]


def test_the_conversation_that_changed_last_comes_first(store: ChatStore) -> None:
    old, new = store.create(ChatSettings()), store.create(ChatSettings())
    say(store, old, "again")
    assert [chat.id for chat in store.conversations()] == [old, new]


def test_the_first_question_is_the_title_and_a_long_one_is_cut(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    say(store, chat, "How \n many " + "words " * 40, "answer", "second")
    title = store.conversations()[0].title
    assert title.startswith("How many words")
    assert title.endswith("…")
    assert len(title) <= 48


def test_search_finds_titles_and_text_literally(store: ChatStore) -> None:
    pages, shares = store.create(ChatSettings()), store.create(ChatSettings())
    say(store, pages, "What is a KV page?", "Sixteen tokens.")
    say(store, shares, "Shares", "It takes 100% of them.")
    assert [chat.id for chat in store.conversations("kv PAGE")] == [pages]
    assert [chat.id for chat in store.conversations("100%")] == [shares]
    assert store.conversations("0_0") == []
    assert len(store.conversations("")) == 2


def test_deleting_takes_a_long_chain_of_turns_along(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    say(store, chat, *["x"] * 1200)
    store.delete(chat)
    assert store.conversations() == []
    assert len(store.tree(chat)) == 0


def test_settings_and_title_can_be_changed(store: ChatStore) -> None:
    chat = store.create(ChatSettings())
    store.set_settings(chat, ChatSettings(max_tokens=7))
    store.rename(chat, " Tuning ")
    kept = store.conversation(chat)
    assert kept is not None
    assert (kept.title, kept.settings.max_tokens) == ("Tuning", 7)


def test_presets_are_kept_by_name_and_hide_a_built_in_one(store: ChatStore) -> None:
    store.keep_preset(Preset(name="mine", settings=ChatSettings(seed=1)))
    store.keep_preset(Preset(name="mine", settings=ChatSettings(seed=2)))
    store.keep_preset(Preset(name="Exact", settings=ChatSettings(temperature=0.1)))
    presets = all_presets(store.presets())
    assert [(preset.name, preset.settings.seed) for preset in presets][:2] == [("Exact", None), ("mine", 2)]
    assert len(presets) == len(BUILTIN) + 1
    store.delete_preset("mine")
    assert [preset.name for preset in store.presets()] == ["Exact"]


def test_a_preset_without_a_system_prompt_or_model_leaves_those_there_are() -> None:
    mine = ChatSettings(system_prompt="Be kind.", model="demo", seed=3)
    assert apply_preset(Preset(name="p", settings=ChatSettings(temperature=0.0)), mine) == ChatSettings(
        system_prompt="Be kind.", model="demo", temperature=0.0
    )
    assert apply_preset(Preset(name="p", settings=ChatSettings(system_prompt="Rhyme.")), mine).system_prompt == "Rhyme."


def test_settings_are_described_in_a_line() -> None:
    settings = ChatSettings(temperature=0.3, top_p=0.9, max_tokens=200, enable_thinking=False, system_prompt="x")
    assert describe_settings(settings) == "temperature 0.3 · top_p 0.9 · max 200 tokens · thinking off · system prompt"
    assert describe_settings(ChatSettings()) == "model defaults"
