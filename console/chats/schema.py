"""The tables that conversations are kept in, and how files of earlier versions become files of this one."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

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
_STEPS = (_TABLES_1, _TREES_2)
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
