"""What is kept of conversations. Every value is JSON-able; fields may be added, never renamed: files hold them."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["user", "assistant"]


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation asks: None leaves a value to the model's own defaults.

    model: the model or adapter that is asked; "" is whichever is in view.
    """

    model: str = ""
    system_prompt: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class TurnNote(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers under an answer. finish: how it ended, "" while it has not; "cancelled" is stopped.

    problem: one sentence where it failed.
    """

    model: str = ""
    output_tokens: int = 0
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    finish: str = ""
    problem: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message. parent: the turn before it, None for a first one; turns with the same parent are other branches.

    unfinished: an answer that is being given, or was when the program ended unexpectedly.
    """

    id: int
    parent: int | None = None
    role: Role
    content: str
    note: TurnNote = TurnNote()
    unfinished: bool = False

    @property
    def failed(self) -> bool:
        """Whether it is an answer that failed before its first word."""
        return not self.content and bool(self.note.problem)


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """The second of two branches that are asked side by side. leaf: its last turn."""

    settings: ChatSettings
    leaf: int | None = None


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its turns. changed: unix time of the last turn; leaf: where the branch shown ends."""

    id: int
    title: str
    settings: ChatSettings
    changed: float
    leaf: int | None = None
    beside: Beside | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Settings under a name. builtin: it comes with the program and stays."""

    name: str
    settings: ChatSettings
    builtin: bool = False
