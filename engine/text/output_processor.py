"""From the tokens of an answer to its text: detokenizing, stop strings, banned strings, limits, finish reasons."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from engine.backends.base import BackendRequest, FinishReason
from engine.text.thinking import ThinkingSplitter
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer, begins_text

# Stop strings in streamed text.


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, and lets nothing of it through.

    The match that is complete first wins (of several ending there, the longest), for that is where an answer ends;
    how the text is split into pieces changes nothing. Held back is only the longest end of the text that a stop
    string may begin with. include_stop: whether the stop string itself is visible.

    found: the one that was found, "" while none was.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held_back = ""
        self.found = ""

    @property
    def num_held_back(self) -> int:
        """Characters that are held back."""
        return len(self._held_back)

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what is visible now, and whether a stop string was found (all later text is
        dropped)."""
        if not self._stops:
            return text, False
        if self.found:
            return "", True
        text = self._held_back + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        match = min(matches, default=None)
        if match is not None:
            end, start = match
            self._held_back, self.found = "", text[start:end]
            return text[: end if self._include_stop else start], True
        visible = len(text) - self._possible_start(text)
        self._held_back = text[visible:]
        return text[:visible], False

    def flush(self) -> str:
        """Return the text held back, when no more comes and it is no stop string after all."""
        text, self._held_back = self._held_back, ""
        return text

    def _possible_start(self, text: str) -> int:
        """How many characters at the end of `text` may begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


# Banned strings in streamed text, whatever their case.

_START = 0
_MAX_AUTOMATA = 16


@dataclass(slots=True)
class _State:
    """A text that some banned strings begin with. ends: length of the longest banned string that it ends with."""

    depth: int
    next: dict[str, int] = field(default_factory=dict)
    fallback: int = _START
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
        while (found := states[state].next.get(character)) is None and state != _START:
            state = states[state].fallback
        return _START if found is None else found

    def depth(self, state: int) -> int:
        """Folded characters at the text's end that a string begins with."""
        return self._states[state].depth

    def ends(self, state: int) -> int:
        """Folded characters of the longest string that ends here; 0 where none does."""
        return self._states[state].ends

    def _add(self, folded: str) -> None:
        state = _START
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
            if state == _START:
                continue
            target = self._states[reached]
            target.fallback = self.step(self._states[state].fallback, character)
            target.ends = max(target.ends, self._states[target.fallback].ends)

    def _breadth_first(self) -> Iterator[tuple[int, str, int]]:
        waiting = deque([_START])
        while waiting:
            state = waiting.popleft()
            for character, reached in self._states[state].next.items():
                yield state, character, reached
                waiting.append(reached)


class BannedStrings:
    """Watches the text of one answer for strings that it must not contain.

    Every character comes from a token; `push` returns the token in which the first banned string begins.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automaton = automaton(tuple(strings))
        self._state = _START
        self._tokens: deque[int] = deque()

    @property
    def clear(self) -> bool:
        """True if no banned string has begun: nothing of the text so far can become part of one."""
        return self._state == _START

    def push(self, text: str, token: int) -> int | None:
        """Take more text, of token number `token`; return the number of the token in which a banned string began that
        is complete now, else None. Of several, it is the first to be complete, and of those the longest."""
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


@lru_cache(_MAX_AUTOMATA)
def automaton(strings: tuple[str, ...]) -> Automaton:
    """Return the automaton of these strings, cached for the requests of one client, which ban the same."""
    return Automaton(strings)


class TextOutput(msgspec.Struct, frozen=True):
    """Result of one token: text that is visible now, and the finish reason if the answer ends with it.

    thinking: as `text`, of what stands before the answer.
    settled: whether this token and all before it stay. Tokens that are not settled bring no text: it comes with the
    one that settles them.  banned_from: number (from 0) of the token in which a banned string begins, complete now;
    the answer has to be resumed before it, with a new OutputProcessor.
    """

    text: str = ""
    thinking: str = ""
    finish: FinishReason | None = None
    settled: bool = True
    banned_from: int | None = None


class OutputProcessor:
    """Detokenises one answer and ends it at end tokens, stop strings and max_tokens.

    An end token makes no text. Before min_tokens an end token neither ends the answer nor is shown (backends mask it,
    so it should not come), and text is not searched for stop strings: they are looked for from token number
    min_tokens on, and not in JSON that a grammar demands. What is emitted depends on the ids alone, so a
    request that lost its worker continues seamlessly: `request.generated` is replayed silently, and what had been held
    back is held back again.

    Where the answer may begin with thinking, that is kept apart: stop strings are looked for after it.

    Where strings are banned, tokens settle only when none of those has begun: only then can nothing that was emitted
    become part of one, whatever comes after tokens have been taken back.
    """

    def __init__(self, tokenizer: Tokenizer, request: BackendRequest) -> None:
        """thinking_tokens: how many of the tokens so far are thinking."""
        params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_token_ids,
            begins=begins_text(tokenizer, request.prompt_ids, params, continues=request.continues),
        )
        stops = () if params.grammar is not None and params.grammar.is_json else params.stop
        self._stops = StopMatcher(stops, params.include_stop)
        self._banned = BannedStrings(params.banned_strings) if params.banned_strings else None
        self._end_token_ids = frozenset(request.end_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._thinking = ThinkingSplitter(params.thinking) if params.thinking is not None else None
        self._tokens = 0
        self.thinking_tokens = 0
        self._character_from = 0
        self._banned_from: int | None = None
        self._unsettled = self._unsettled_thinking = ""
        self._finish: FinishReason | None = None
        self._can_stop = bool(stops)
        self._is_simple = not stops and not params.banned_strings
        self._plain = self._is_simple and self._thinking is None
        for token_id in request.generated:
            self.push(token_id)

    @property
    def stop(self) -> str:
        """The stop string that ended the answer, "" where none did."""
        return self._stops.found

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason, None before the end (set after the constructor if the replayed ids end it)."""
        return self._finish

    def push_plain(self, token_id: int) -> str | None:
        """Return the text of the next token where nothing in it can end the answer or be held back for a string, as in
        nearly all; else None, and `push` has to take it."""
        tokens = self._tokens + 1
        if (
            not self._plain
            or self._finish is not None
            or token_id in self._end_token_ids
            or (self._max_tokens is not None and tokens >= self._max_tokens)
        ):
            return None
        self._tokens = tokens
        return self._detokenizer.push(token_id)

    def push(self, token_id: int) -> TextOutput:
        """Take the next token; after the end, nothing changes."""
        if self._finish is not None:
            return TextOutput(finish=self._finish)
        if self._banned is not None and not self._detokenizer.has_partial_character:
            self._character_from = self._tokens
        self._tokens += 1
        thinking, text, stopped = "", "", self._tokens > self._min_tokens
        if token_id not in self._end_token_ids:
            thinking, text, stopped = self._visible(self._detokenizer.push(token_id))
        finish: FinishReason | None = None
        if stopped or (self._max_tokens is not None and self._tokens >= self._max_tokens):
            rest = self._rest()
            thinking, text = thinking + rest[0], text + rest[1]
            finish = "stop" if stopped or self.stop else "length"
        if self._banned_from is not None:
            return TextOutput(settled=False, banned_from=self._banned_from)
        self._finish = finish
        self._unsettled += text
        self._unsettled_thinking += thinking
        if (
            finish is None
            and self._banned is not None
            and not (self._banned.clear and not self._detokenizer.has_partial_character)
        ):
            return TextOutput(settled=False)
        text, self._unsettled = self._unsettled, ""
        thinking, self._unsettled_thinking = self._unsettled_thinking, ""
        return TextOutput(text, thinking, finish)

    def ruled_out(self, forced: bytes) -> bool:
        """Return whether these bytes, the only ones that may come next, would make a banned string complete."""
        if self._banned is None or self._can_stop or self._finish is not None:
            return False
        return self._banned.completes(self._detokenizer.ahead(forced))

    def flush(self) -> tuple[str, str]:
        """Return all thinking and text still held back, for an answer that its backend had to end here."""
        thinking, self._unsettled_thinking = self._unsettled_thinking, ""
        text, self._unsettled = self._unsettled, ""
        rest = self._rest()
        return (thinking, text) if self._banned_from is not None else (thinking + rest[0], text + rest[1])

    def _rest(self) -> tuple[str, str]:
        """Return the thinking and the text that detokenizer, splitter and stop matcher hold back."""
        thinking, text, _ = self._visible(self._detokenizer.flush())
        if self._thinking is not None:
            more, rest = self._thinking.flush()
            thinking, text = thinking + more, text + self._stops.push(rest)[0]
        return thinking, text + self._stops.flush()

    def _visible(self, raw: str) -> tuple[str, str, bool]:
        """Return the thinking and the answer that are visible now, and whether a stop string ends the answer."""
        thinking, answer = ("", raw) if self._thinking is None else self._split(self._thinking, raw)
        num_before = self._stops.num_held_back
        text, stopped = self._stops.push(answer) if self._tokens >= self._min_tokens else (answer, False)
        if self._banned is not None and self._banned_from is None:
            # Thinking is watched, too; after a stop string, only what is visible before it.
            unseen = len(answer) - max(0, len(text) - num_before) if stopped else 0
            self._banned_from = self._banned.push(raw[: len(raw) - unseen], self._character_from)
        return thinking, text, stopped

    def _split(self, splitter: ThinkingSplitter, raw: str) -> tuple[str, str]:
        """Return the thinking and the answer in new text; after the thinking there is no more to split."""
        was_answer = splitter.in_answer
        found = splitter.push(raw)
        if splitter.has_thought and not was_answer:
            self.thinking_tokens = self._tokens
        if splitter.is_over:
            self._thinking, self._plain = None, self._is_simple
        return found
