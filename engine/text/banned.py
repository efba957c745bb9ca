"""Banned strings in streamed text, whatever their case."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_BEGUN = 0
_AUTOMATA_KEPT = 16


@dataclass(slots=True)
class _State:
    """A text that some banned strings begin with. ends: length of the longest banned string that it ends with."""

    depth: int
    next: dict[str, int] = field(default_factory=dict)
    fallback: int = _BEGUN
    ends: int = 0


class Automaton:
    """Finds strings in a text in one pass over it, however many there are (Aho, Corasick 1975). Immutable.

    Text and strings are compared by their full case folding (Unicode, `str.casefold`), character by character.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._states = [_State(0)]
        for string in strings:
            self._add(string.casefold())
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more folded character; 0 is where no string is under way."""
        states = self._states
        while (found := states[state].next.get(character)) is None and state != _BEGUN:
            state = states[state].fallback
        return _BEGUN if found is None else found

    def depth(self, state: int) -> int:
        """Folded characters at the text's end that a string begins with."""
        return self._states[state].depth

    def ends(self, state: int) -> int:
        """Folded characters of the longest string that ends here; 0 where none does."""
        return self._states[state].ends

    def _add(self, folded: str) -> None:
        state = _BEGUN
        for depth, character in enumerate(folded, start=1):
            following = self._states[state].next
            if character not in following:
                following[character] = len(self._states)
                self._states.append(_State(depth))
            state = following[character]
        self._states[state].ends = len(folded)

    def _link(self) -> None:
        """Give each state its fallback, the longest of its proper ends that is a state: shorter ones come first."""
        for state, character, reached in self._breadth_first():
            if state == _BEGUN:
                continue
            target = self._states[reached]
            target.fallback = self.step(self._states[state].fallback, character)
            target.ends = max(target.ends, self._states[target.fallback].ends)

    def _breadth_first(self) -> Iterator[tuple[int, str, int]]:
        waiting = deque([_BEGUN])
        while waiting:
            state = waiting.popleft()
            for character, reached in self._states[state].next.items():
                yield state, character, reached
                waiting.append(reached)


class BannedStrings:
    """Watches the text of one answer for strings that it must not contain.

    Every character comes from a token; `push` tells the token in which the first banned string begins.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automaton = automaton(tuple(strings))
        self._state = _BEGUN
        self._tokens: deque[int] = deque()

    @property
    def clear(self) -> bool:
        """Whether no banned string has begun: nothing of the text so far can become part of one."""
        return self._state == _BEGUN

    def push(self, text: str, token: int) -> int | None:
        """Take more text, which comes from token number `token`. The number of the token in which a banned string
        began that is complete now, else None; of several, the first to be complete, and of those the longest."""
        for character in text.casefold():
            self._state = self._automaton.step(self._state, character)
            self._tokens.append(token)
            if ends := self._automaton.ends(self._state):
                return self._tokens[-ends]
            for _ in range(len(self._tokens) - self._automaton.depth(self._state)):
                self._tokens.popleft()
        return None

    def completes(self, text: str) -> bool:
        """Return whether `text` would make a banned string complete if it came next."""
        state = self._state
        for character in text.casefold():
            state = self._automaton.step(state, character)
            if self._automaton.ends(state):
                return True
        return False


@lru_cache(_AUTOMATA_KEPT)
def automaton(strings: tuple[str, ...]) -> Automaton:
    """The automaton of these strings, kept for the requests of one client, which ban the same."""
    return Automaton(strings)
