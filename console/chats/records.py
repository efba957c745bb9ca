"""Records of conversations. Every value is JSON-able; fields may be added, never renamed: files hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from engine.samplers import added_parameters, with_fields

Role = Literal["user", "assistant"]
T = TypeVar("T", bound=msgspec.Struct)


def _added_fields(struct: type[T]) -> type[T]:
    """The struct with a field for each parameter that a file of engine/samplers/ adds to the chat's form."""
    rows = [row for row in added_parameters() if row.label]
    return with_fields(struct, [(row.name, type(row.neutral) | None, None) for row in rows])


@_added_fields
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
    enable_thinking: bool | None = None


class TurnNote(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers under an answer. finish: how it ended, "" while it has not; "cancelled" is stopped.

    thinking_s: from the first of the thinking to the first of the answer.  problem: one sentence where it failed.
    """

    model: str = ""
    output_tokens: int = 0
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    thinking_s: float = 0.0
    finish: str = ""
    problem: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message. parent: the turn before it, None for a first one; turns with the same parent are other branches.

    thinking: of the model, before an answer.
    unfinished: an answer that is being given, or was when the program ended unexpectedly.
    """

    id: int
    parent: int | None = None
    role: Role
    content: str
    thinking: str = ""
    note: TurnNote = TurnNote()
    unfinished: bool = False

    @property
    def failed(self) -> bool:
        """True if it is an answer that failed before its first word."""
        return not (self.content or self.thinking) and bool(self.note.problem)

    @property
    def is_thinking(self) -> bool:
        """True if it has thinking and no answer yet."""
        return bool(self.thinking) and not self.content


class SecondBranch(msgspec.Struct, frozen=True, kw_only=True):
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
    beside: SecondBranch | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Settings under a name. builtin: it comes with the program and stays."""

    name: str
    settings: ChatSettings
    builtin: bool = False


# Tree: the turns of one conversation; another answer or an edited question is another branch of it. Pure.


class Tree:
    """Turns by id. Branches are in the order in which they were made, which is that of the ids."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[int, Turn] = {}
        self._branches: dict[int | None, list[int]] = {}
        for turn in turns:
            self.put(turn)

    def __len__(self) -> int:
        return len(self._turns)

    def all(self) -> list[Turn]:
        """Every turn of every branch, by id."""
        return [self._turns[at] for at in sorted(self._turns)]

    def get(self, turn_id: int | None) -> Turn | None:
        """The turn of that id, where there is one."""
        return None if turn_id is None else self._turns.get(turn_id)

    def put(self, turn: Turn) -> None:
        """Add a turn, or replace the one of its id."""
        if turn.id not in self._turns:
            self._branches.setdefault(turn.parent, []).append(turn.id)
        self._turns[turn.id] = turn

    def remove(self, turn_id: int) -> None:
        """Take away a turn that nothing follows."""
        turn = self._turns.pop(turn_id)
        self._branches[turn.parent].remove(turn_id)

    def beneath(self, turn_id: int) -> list[int]:
        """The id of a turn and of all that follow it, in all branches, each before those that follow it."""
        found = [turn_id]
        for each in found:
            found += self._branches.get(each, ())
        return found

    def path(self, leaf: int | None) -> list[Turn]:
        """The turns from the first one to `leaf`; none where there is no such turn."""
        path: list[Turn] = []
        turn = self.get(leaf)
        while turn is not None:
            path.append(turn)
            turn = self.get(turn.parent)
        return path[::-1]

    def siblings(self, turn_id: int) -> list[int]:
        """The ids of the branches that begin where that turn does, itself among them."""
        return self._branches[self._turns[turn_id].parent]

    def tip(self, turn_id: int | None) -> int | None:
        """The end of the branch made last beneath a turn; None is the root of all."""
        while after := self._branches.get(turn_id):
            turn_id = after[-1]
        return turn_id
