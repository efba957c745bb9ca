"""ChatStore: conversations in one SQLite file, written so that a program killed at any moment loses nothing kept."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from console.chats.records import ChatSettings, Conversation, Preset, Role, SecondBranch, Tree, Turn, TurnNote
from engine.errors import EngineError
from engine.system.files import make_private_file, make_private_folder
from engine.system.slow_disk import writes

# The tables that conversations are kept in, and how files of earlier versions become files of this one.

_TABLES_1 = """
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY,
    title TEXT NOT NULL,
    settings BLOB NOT NULL,
    changed REAL NOT NULL
);
CREATE TABLE turn (
    id INTEGER PRIMARY KEY,
    conversation INTEGER NOT NULL REFERENCES conversation(id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    note BLOB NOT NULL
);
CREATE INDEX turn_of_conversation ON turn(conversation, id);
"""
# parent is no foreign key: deleting a conversation would follow it turn by turn, deeper than SQLite goes.
_TREES_2 = """
ALTER TABLE turn ADD COLUMN parent INTEGER;
ALTER TABLE turn ADD COLUMN unfinished INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversation ADD COLUMN leaf INTEGER;
ALTER TABLE conversation ADD COLUMN beside BLOB;
UPDATE turn SET parent = (
    SELECT MAX(before.id) FROM turn AS before WHERE before.conversation = turn.conversation AND before.id < turn.id
);
UPDATE conversation SET leaf = (SELECT MAX(id) FROM turn WHERE turn.conversation = conversation.id);
CREATE INDEX turn_unfinished ON turn(id) WHERE unfinished;
CREATE TABLE preset (name TEXT PRIMARY KEY, settings BLOB NOT NULL);
"""
_THINKING_3 = "ALTER TABLE turn ADD COLUMN thinking TEXT NOT NULL DEFAULT ''"
_STEPS = (_TABLES_1, _TREES_2, _THINKING_3)
"""_STEPS[n] makes version n + 1 of version n; a new file goes through all of them."""
VERSION = len(_STEPS)


def version_of(db: sqlite3.Connection) -> int:
    """0 is a new file."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection) -> None:
    """Bring a file of an earlier version to this one, all of it or nothing. Raises sqlite3.Error."""
    if version_of(db) >= VERSION:
        return
    with transaction(db):
        for step in _STEPS[version_of(db) :]:
            for statement in filter(str.strip, step.split(";")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {VERSION}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All that is done in here, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


T = TypeVar("T")
TITLE_LENGTH = 48
LOCK_TIMEOUT_S = 0.5
"""How long a write waits for another program that writes: a screen waits with it."""
_CONVERSATION = "SELECT id, title, settings, changed, leaf, beside FROM conversation"
_FOUND = r"""WHERE title LIKE ?1 ESCAPE '\' OR EXISTS (
    SELECT 1 FROM turn WHERE turn.conversation = conversation.id AND turn.content LIKE ?1 ESCAPE '\')"""


class ChatStoreError(EngineError):
    """Conversations cannot be read or kept."""

    code = "chat_store"


class ChatStore:
    """Conversations in one file (WAL); used from one thread. path None keeps them in memory.

    Where the file can be read but not written, all of it is taken into memory and `problem` says so in a sentence;
    the same happens later, when a write fails. Raises ChatStoreError for a file that cannot be read, or is of a
    newer version.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.problem = ""
        try:
            if path is not None:
                make_private_folder(path.parent)
                make_private_file(path)
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, isolation_level=None, timeout=LOCK_TIMEOUT_S
            )
            if version_of(self._db) > VERSION:
                raise ChatStoreError(f"{path} was written by a newer version of this program.")
        except (OSError, sqlite3.Error) as error:
            raise ChatStoreError(self._sentence(error)) from None
        try:
            _prepare(self._db)
        except sqlite3.Error as error:
            self._go_on_in_memory(error)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # -- conversations -----------------------------------------------------------------------------------------------

    def conversations(self, search: str = "") -> Sequence[Conversation]:
        """Those whose title or text has `search` in it, the one that changed last first."""
        where, values = (_FOUND, (_pattern(search),)) if search else ("", ())
        rows = self._rows(f"{_CONVERSATION} {where} ORDER BY changed DESC, id DESC", *values)
        return [_conversation(row) for row in rows]

    def conversation(self, conversation: int) -> Conversation | None:
        """One of them, where it is there."""
        rows = self._rows(f"{_CONVERSATION} WHERE id = ?", conversation)
        return _conversation(rows[0]) if rows else None

    def create(self, settings: ChatSettings, title: str = "") -> int:
        """A new, empty conversation; returns its id."""
        sql = "INSERT INTO conversation (title, settings, changed) VALUES (?, ?, ?)"
        return self._write(lambda db: _new_id(db.execute(sql, (title, _json(settings), time.time()))))

    def set_settings(self, conversation: int, settings: ChatSettings) -> None:
        """Ask differently from now on."""
        self._execute("UPDATE conversation SET settings = ? WHERE id = ?", _json(settings), conversation)

    def rename(self, conversation: int, title: str) -> None:
        """Give a conversation another title."""
        self._execute("UPDATE conversation SET title = ? WHERE id = ?", title.strip(), conversation)

    def show(self, conversation: int, leaf: int | None, second: SecondBranch | None = None) -> None:
        """Save which branch is shown, and the second one of a comparison."""
        encoded = _json(second) if second is not None else None
        self._execute("UPDATE conversation SET leaf = ?, beside = ? WHERE id = ?", leaf, encoded, conversation)

    def delete(self, conversation: int) -> None:
        """Forget a conversation and its turns."""
        self._execute("DELETE FROM conversation WHERE id = ?", conversation)

    # -- turns -------------------------------------------------------------------------------------------------------

    def tree(self, conversation: int) -> Tree:
        """All that was said, in all branches."""
        sql = (
            "SELECT id, parent, role, content, thinking, note, unfinished FROM turn WHERE conversation = ? ORDER BY id"
        )
        rows = self._rows(sql, conversation)
        return Tree(_turn(row) for row in rows)

    def add(
        self,
        conversation: int,
        parent: int | None,
        role: Role,
        content: str,
        *,
        thinking: str = "",
        note: TurnNote = TurnNote(),  # noqa: B008 - frozen
        unfinished: bool = False,
    ) -> Turn:
        """A new turn after `parent`; a first question gives the conversation its title."""
        titled = "UPDATE conversation SET title = ? WHERE id = ? AND title = ''"

        def write(db: sqlite3.Connection) -> Turn:
            cursor = db.execute(
                "INSERT INTO turn (conversation, parent, role, content, thinking, note, unfinished)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (conversation, parent, role, content, thinking, _json(note), unfinished),
            )
            db.execute("UPDATE conversation SET changed = ? WHERE id = ?", (time.time(), conversation))
            if role == "user":
                db.execute(titled, (_title(content), conversation))
            return Turn(
                id=_new_id(cursor),
                parent=parent,
                role=role,
                content=content,
                thinking=thinking,
                note=note,
                unfinished=unfinished,
            )

        return self._write(write)

    def keep(self, turn: Turn) -> None:
        """Write down how far a turn has come."""
        sql = "UPDATE turn SET content = ?, thinking = ?, note = ?, unfinished = ? WHERE id = ?"
        self._execute(sql, turn.content, turn.thinking, _json(turn.note), turn.unfinished, turn.id)

    def remove(self, turn_ids: Sequence[int]) -> None:
        """Forget turns, and with them all that follows them."""
        self._write(lambda db: db.executemany("DELETE FROM turn WHERE id = ?", [(each,) for each in turn_ids]))

    # -- presets -----------------------------------------------------------------------------------------------------

    def presets(self) -> Sequence[Preset]:
        """Those that were kept, by name."""
        rows = self._rows("SELECT name, settings FROM preset ORDER BY name COLLATE NOCASE")
        return [Preset(name=row[0], settings=_settings.decode(row[1])) for row in rows]

    def keep_preset(self, preset: Preset) -> None:
        """Add a preset, or replace the one of its name."""
        self._execute(
            "INSERT OR REPLACE INTO preset (name, settings) VALUES (?, ?)", preset.name, _json(preset.settings)
        )

    def delete_preset(self, name: str) -> None:
        """Forget a preset."""
        self._execute("DELETE FROM preset WHERE name = ?", name)

    # -- the file ----------------------------------------------------------------------------------------------------

    def _rows(self, sql: str, *values: object) -> list[Any]:
        """Return the rows of a query; in a file that broke meanwhile, nothing."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            self._go_on_with(_memory(), error)
            return self._db.execute(sql, values).fetchall()

    def _execute(self, sql: str, *values: object) -> None:
        self._write(lambda db: db.execute(sql, values))

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction; where the file takes it no more, in memory from then on."""
        for _ in range(2):
            try:
                with writes.timed(self._path), transaction(self._db):
                    return work(self._db)
            except sqlite3.Error as error:
                self._go_on_in_memory(error)
        raise ChatStoreError("Conversations cannot be saved, not even in memory.")

    def _go_on_in_memory(self, error: sqlite3.Error) -> None:
        """Take all there is into memory; the file stays as it is. Raises ChatStoreError where it cannot be read."""
        try:
            self._go_on_with(_memory(self._db), error)
        except sqlite3.Error:
            raise ChatStoreError(self._sentence(error)) from None

    def _go_on_with(self, memory: sqlite3.Connection, error: sqlite3.Error) -> None:
        if self._path is None or self.problem:
            raise ChatStoreError(self._sentence(error)) from None
        self._db.close()
        self._db = memory
        self.problem = f"{self._sentence(error)} From now on they are kept in memory only."

    def _sentence(self, error: Exception) -> str:
        return f"Conversations cannot be saved in {self._path or 'memory'}: {error}."


def _memory(source: sqlite3.Connection | None = None) -> sqlite3.Connection:
    """Tables in memory, with what `source` has. Raises sqlite3.Error where that cannot be read."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    if source is not None:
        source.backup(memory)
    _prepare(memory)
    return memory


def _prepare(db: sqlite3.Connection) -> None:
    """Ready for use: of this version, and no answer unfinished, as its worker has ended."""
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    migrate(db)
    with transaction(db):
        for turn_id, note in db.execute("SELECT id, note FROM turn WHERE unfinished").fetchall():
            stopped = msgspec.structs.replace(_note.decode(note), finish="cancelled")
            db.execute("UPDATE turn SET unfinished = 0, note = ? WHERE id = ?", (_json(stopped), turn_id))


_json = msgspec.json.encode
_settings = msgspec.json.Decoder(ChatSettings)
_second_branch = msgspec.json.Decoder(SecondBranch)
_note = msgspec.json.Decoder(TurnNote)


def _conversation(row: tuple[int, str, bytes, float, int | None, bytes | None]) -> Conversation:
    return Conversation(
        id=row[0],
        title=row[1],
        settings=_settings.decode(row[2]),
        changed=row[3],
        leaf=row[4],
        beside=_second_branch.decode(row[5]) if row[5] is not None else None,
    )


def _turn(row: tuple[int, int | None, Role, str, str, bytes, int]) -> Turn:
    return Turn(
        id=row[0],
        parent=row[1],
        role=row[2],
        content=row[3],
        thinking=row[4],
        note=_note.decode(row[5]),
        unfinished=bool(row[6]),
    )


def _new_id(cursor: sqlite3.Cursor) -> int:
    return int(cursor.lastrowid or 0)


def _pattern(search: str) -> str:
    """Return the LIKE pattern that matches `search` literally."""
    for special in "\\%_":
        search = search.replace(special, f"\\{special}")
    return f"%{search}%"


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 1].rstrip() + "…"
