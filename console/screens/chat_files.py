"""Conversations to files in the folder that the console was started in, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from console.chats import ChatStore, ChatStoreError, OpenChat, Turn
from console.chats.export import Kind, export, from_json, read_into, to_json, to_markdown, write_new
from engine.errors import InvalidRequest

MAX_BYTES = 64 * 2**20
"""Of a conversation that is read back."""


def write(store: ChatStore, chat: OpenChat, path: Sequence[Turn], kind: Kind, folder: Path) -> Path:
    """Markdown of the turns of `path`, or JSON of all branches, in a new file. Raises ChatStoreError."""
    kept = store.conversation(chat.id) if chat.id is not None else None
    if kept is None:
        raise ChatStoreError("There is nothing to export yet.")
    markdown = to_markdown(kept.title, kept.settings, path).encode()
    try:
        return write_new(folder, kept.title, kind, markdown if kind == "md" else to_json(export(kept, chat.tree)))
    except OSError as error:
        raise ChatStoreError(f"The conversation cannot be written to {folder}: {error.strerror}") from None


def read_back(store: ChatStore, path: Path) -> int:
    """Keep what was exported to a JSON file as another conversation; returns its id. Raises InvalidRequest."""
    try:
        file = path.expanduser()
        if file.stat().st_size > MAX_BYTES or not file.is_file():
            raise InvalidRequest(f"{path} is no file of up to {MAX_BYTES // 2**20} MiB")
        data = file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, or the home of nobody
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return read_into(store, from_json(data))
