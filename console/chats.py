"""Conversations, kept in SQLite: what was said, with which settings, and how fast the answers came."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import EngineError

_SCHEMA = """
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
"""
_VERSION = 1
TITLE_LENGTH = 48


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation asks: None leaves a value to the model's own defaults."""

    system_prompt: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None


class TurnNote(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers under an answer."""

    model: str = ""
    output_tokens: int = 0
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    finish: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str
    note: TurnNote = TurnNote()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its turns. changed: unix time of the last turn."""

    id: int
    title: str
    settings: ChatSettings
    changed: float


class ChatStoreError(EngineError):
    """Conversations cannot be read or kept."""

    code = "chat_store"


class ChatStore:
    """Conversations in one SQLite file; used from one thread. path None keeps them in memory."""

    def __init__(self, path: Path | None) -> None:
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self._db.execute("PRAGMA foreign_keys = ON")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise ChatStoreError(f"{path} was written by a newer version of this program", version=version)
            if path is not None:
                self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise ChatStoreError(f"Conversations cannot be kept in {path}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def conversations(self) -> Sequence[Conversation]:
        """All of them, the one that changed last first."""
        rows = self._db.execute("SELECT id, title, settings, changed FROM conversation ORDER BY changed DESC, id DESC")
        return [
            Conversation(id=row[0], title=row[1], settings=_settings.decode(row[2]), changed=row[3]) for row in rows
        ]

    def turns(self, conversation: int) -> Sequence[Turn]:
        """What was said, oldest first."""
        rows = self._db.execute(
            "SELECT role, content, note FROM turn WHERE conversation = ? ORDER BY id", (conversation,)
        )
        return [Turn(role=row[0], content=row[1], note=_note.decode(row[2])) for row in rows]

    def create(self, settings: ChatSettings) -> int:
        """A new, empty conversation; returns its id."""
        cursor = self._db.execute(
            "INSERT INTO conversation (title, settings, changed) VALUES ('', ?, ?)",
            (msgspec.json.encode(settings), time.time()),
        )
        return int(cursor.lastrowid or 0)

    def append(self, conversation: int, turn: Turn) -> None:
        """Add a turn; the first one by the user gives the conversation its title."""
        self._db.execute("BEGIN")
        self._db.execute(
            "INSERT INTO turn (conversation, role, content, note) VALUES (?, ?, ?, ?)",
            (conversation, turn.role, turn.content, msgspec.json.encode(turn.note)),
        )
        self._db.execute("UPDATE conversation SET changed = ? WHERE id = ?", (time.time(), conversation))
        if turn.role == "user":
            self._db.execute(
                "UPDATE conversation SET title = ? WHERE id = ? AND title = ''", (_title(turn.content), conversation)
            )
        self._db.execute("COMMIT")

    def drop_last_answer(self, conversation: int) -> None:
        """Take the last turn away if it is an answer (to give another one)."""
        self._db.execute(
            "DELETE FROM turn WHERE role = 'assistant' AND id = (SELECT MAX(id) FROM turn WHERE conversation = ?)",
            (conversation,),
        )

    def set_settings(self, conversation: int, settings: ChatSettings) -> None:
        """Ask differently from now on."""
        self._db.execute(
            "UPDATE conversation SET settings = ? WHERE id = ?", (msgspec.json.encode(settings), conversation)
        )

    def rename(self, conversation: int, title: str) -> None:
        """Give a conversation another title."""
        self._db.execute("UPDATE conversation SET title = ? WHERE id = ?", (title.strip(), conversation))

    def delete(self, conversation: int) -> None:
        """Forget a conversation and its turns."""
        self._db.execute("DELETE FROM conversation WHERE id = ?", (conversation,))


_settings = msgspec.json.Decoder(ChatSettings)
_note = msgspec.json.Decoder(TurnNote)


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 1].rstrip() + "…"
