"""A conversation as a file: Markdown of the branch shown, or JSON of all branches, which can be read back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from markdown_it import MarkdownIt

from console.chats.records import ChatSettings, Conversation, Role, Tree, Turn, TurnNote
from console.chats.store import ChatStore
from console.text import duration
from engine.config import quote_value
from engine.errors import InvalidRequest

# The code blocks of an answer, from its source: no border, no wrapped line, no blank that a screen added. Pure.


def may_have_code(markdown: str) -> bool:
    """Return whether there may be a code block, without parsing."""
    return any(sign in f"\n{markdown}" for sign in ("```", "~~~", "\n    ", "\n\t"))


def code_blocks(markdown: str) -> list[str]:
    """The text of each block, in order; one that has not ended yet is among them."""
    return [token.content for token in MarkdownIt().parse(markdown) if token.type in ("fence", "code_block")]


Kind = Literal["md", "json"]
_NAME_LENGTH = 40
_SHOWN = 200


class ExportedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. id: its place in the file, from 1; parent: that of the turn before it."""

    id: int
    parent: int | None
    role: Role
    content: str
    thinking: str = ""
    note: TurnNote = TurnNote()


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. shown: the last turn of the branch that was shown."""

    format: Literal["ericllm-chat"] = "ericllm-chat"
    version: Literal[1] = 1
    title: str
    settings: ChatSettings
    shown: int | None
    turns: tuple[ExportedTurn, ...]


def export(conversation: Conversation, tree: Tree) -> Export:
    """All of it; turns are renumbered."""
    turns = tree.all()
    number = {turn.id: at for at, turn in enumerate(turns, start=1)}
    return Export(
        title=conversation.title,
        settings=conversation.settings,
        shown=number.get(conversation.leaf) if conversation.leaf is not None else None,
        turns=tuple(
            ExportedTurn(
                id=number[turn.id],
                parent=number[turn.parent] if turn.parent is not None else None,
                role=turn.role,
                content=turn.content,
                thinking=turn.thinking,
                note=turn.note,
            )
            for turn in turns
        ),
    )


def to_json(exported: Export) -> bytes:
    """Readable, and the same bytes for the same conversation."""
    return msgspec.json.format(msgspec.json.encode(exported), indent=2) + b"\n"


def from_json(data: bytes) -> Export:
    """Read what `to_json` wrote; raises InvalidRequest with what is wrong in it."""
    try:
        exported = msgspec.json.decode(data, type=Export)
    except RecursionError:
        raise InvalidRequest("not an exported conversation: it is nested too deeply") from None
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(f"not an exported conversation: {quote_value(str(error), _SHOWN)}") from None
    seen: set[int] = set()
    for turn in exported.turns:
        if turn.id in seen or (turn.parent is not None and turn.parent not in seen):
            raise InvalidRequest(f"not an exported conversation: turn {turn.id} has no parent")
        seen.add(turn.id)
    return exported


def read_into(store: ChatStore, exported: Export) -> int:
    """Keep an exported conversation as a new one; returns its id."""
    chat = store.create(exported.settings, exported.title)
    ids: dict[int, int] = {}
    for turn in exported.turns:
        parent = ids[turn.parent] if turn.parent is not None else None
        added = store.add(chat, parent, turn.role, turn.content, thinking=turn.thinking, note=turn.note)
        ids[turn.id] = added.id
    store.show(chat, ids.get(exported.shown) if exported.shown is not None else None)
    return chat


def to_markdown(title: str, settings: ChatSettings, turns: Sequence[Turn]) -> str:
    """The branch shown, as text to be read."""
    parts = [f"# {title or 'Conversation'}"]
    if settings.system_prompt:
        parts.append("\n".join(f"> {line}" for line in settings.system_prompt.splitlines()))
    for turn in turns:
        who = "You" if turn.role == "user" else turn.note.model or "Model"
        ended = {"cancelled": " (stopped)", "error": " (failed)"}.get(turn.note.finish, "")
        parts.append(f"## {who}{ended}")
        if turn.thinking:
            summary = f"<summary>{thinking_time(turn.note)}</summary>"
            parts.append(f"<details>{summary}\n\n{turn.thinking.strip()}\n\n</details>")
        if text := turn.content.strip() or turn.note.problem:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def thinking_time(note: TurnNote) -> str:
    """Return "Thought for 12 s"."""
    return f"Thought for {duration(note.thinking_s) if note.thinking_s >= 1 else 'less than 1 s'}"


def file_name(title: str, kind: Kind) -> str:
    """Return a name for the file of a conversation, made of its title."""
    name = re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:_NAME_LENGTH].rstrip("-") or "conversation"
    return f"{name}.{kind}"
