"""Thinking: what a model writes before its answer, between markers, kept apart from the answer's text.

`FORMATS` are the markers of models; the loaded one's are known by its chat template, or by its tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.backends.base import TokenMask
from engine.config import SamplingParams, Thinking, ThinkingName
from engine.errors import InvalidRequest
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """Markers of one format. open, close: around the thinking.  answer: what an answer without thinking begins with,
    "" where that is nothing.  ends: as in `Thinking`, where the request has tools."""

    name: ThinkingName
    open: str
    close: str
    answer: str = ""
    ends: tuple[tuple[str, str], ...] = ()


FORMATS: tuple[ThinkingFormat, ...] = (
    ThinkingFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
        (
            ("<|end|><|start|>assistant<|channel|>commentary<|message|>", ""),
            ("<|end|>", "<|start|>assistant<|channel|>commentary to="),
            ("<|end|>", "<|start|>assistant<|channel|>analysis to="),
            ("<|end|>", "<|start|>assistant to="),
        ),
    ),
    ThinkingFormat("gemma", "<|channel>thought", "<channel|>"),
    ThinkingFormat("magistral", "[THINK]", "[/THINK]"),
    ThinkingFormat("command-a", "<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingFormat("seed", "<seed:think>", "</seed:think>"),
    ThinkingFormat("kimi", "◁think▷", "◁/think▷"),
    ThinkingFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingFormat("exaone", "<thought>", "</thought>"),
    ThinkingFormat("granite", "Here is my thought process:", "Here is my response:"),
    ThinkingFormat("think", "<think>", "</think>"),
)
"""The first one that a model knows is its format. "think" is that of Qwen3, DeepSeek-R1, GLM and many more."""

BY_NAME: Mapping[str, ThinkingFormat] = {each.name: each for each in FORMATS}


def format_of(tokenizer: Tokenizer, setting: str = "auto") -> ThinkingFormat | None:
    """Return the model's format. setting: "auto", "off", or a format's name.

    Automatic is a format whose closing marker is in the chat template, or whose markers both are tokens.
    """
    if setting != "auto":
        return BY_NAME.get(setting)
    return next(
        (
            each
            for each in FORMATS
            if tokenizer.template_contains(each.close)
            or tokenizer.template_contains(each.open)
            or None not in (tokenizer.token_to_id(each.open), tokenizer.token_to_id(each.close))
        ),
        None,
    )


def thinking_after(
    found: ThinkingFormat, prompt: str, *, begun: str = "", budget: int | None = None
) -> Thinking | None:
    """Return how an answer to `prompt` thinks; None where the prompt has ended the thinking already.

    begun: what the prompt ends with of the answer; markers before that are others' text.  budget: most tokens of
    thinking.
    """
    before = prompt.rstrip().removesuffix(begun.strip()).rstrip()
    opened, closed = begun.rfind(found.open), begun.rfind(found.close)
    if opened == closed == -1:
        opened, closed = (0 if before.endswith(marker) else -1 for marker in (found.open, found.close))
    if closed > opened or (begun.strip() and opened < 0):
        return None
    inside = opened >= 0
    has_words = inside and not prompt.rstrip().endswith(found.open)
    return Thinking(
        open=found.open, close=found.close, answer=found.answer, inside=inside, begun=has_words, budget=budget
    )


def begun_in(turns: Sequence[Mapping[str, object]]) -> str:
    """Return what an answer that continues the last turn begins with: its text, else its thinking."""
    return thinking_to_continue(turns) or str(turns[-1].get("content") or "")


def with_thinking(
    found: ThinkingFormat | None,
    params: SamplingParams,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    begun: str = "",
    budget: int | None = None,
) -> SamplingParams:
    """Return the parameters of an answer whose thinking is kept apart; the others as in `thinking_after`."""
    thinking = thinking_after(found, prompt, begun=begun, budget=budget) if found is not None else None
    if found is None or thinking is None:
        return params
    if params.shown_token_ids:  # the markers of calls: the request has tools
        thinking = msgspec.structs.replace(thinking, ends=found.ends)
    shown = (*params.shown_token_ids, *marker_ids(tokenizer, thinking))
    return msgspec.structs.replace(params, thinking=thinking, shown_token_ids=tuple(dict.fromkeys(shown)))


def template_variables(enabled: bool | None) -> dict[str, Any]:
    """Return the variables that switch thinking on or off, as chat templates name them; None leaves it to the model."""
    return {} if enabled is None else {"enable_thinking": enabled, "thinking": enabled}


def thinking_to_continue(turns: Sequence[Mapping[str, object]]) -> str:
    """Return the thinking of a last turn that has nothing else; "" of another."""
    *_, last = turns
    has_more = last.get("tool_calls") or str(last.get("content") or "").strip()
    return "" if has_more else str(last.get("reasoning_content") or "")


def reopened(found: ThinkingFormat | None, prompt: str, thinking: str) -> str:
    """Return a prompt that goes on with thinking which was stopped. prompt: up to where the answer begins.

    Raises InvalidRequest where the model does not think, or the prompt has ended the thinking.
    """
    tail = prompt.rstrip()
    if found is None or tail.endswith(found.close):
        raise InvalidRequest("the last message cannot be continued: it has thinking alone", param="messages")
    return f"{prompt}{'' if tail.endswith(found.open) else found.open}{thinking}"


def marker_ids(tokenizer: Tokenizer, thinking: Thinking) -> tuple[int, ...]:
    """Return the control tokens in the markers, which the text has to include for them to be found."""
    ids = [
        token_id
        for marker in (thinking.open, thinking.close, thinking.answer)
        for token_id in tokenizer.encode(marker, add_special_tokens=False)
    ]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id in tokenizer.special_ids))


class ThinkingSplitter:
    """Splits a text that comes in pieces into thinking and answer, whatever the pieces.

    Blanks around both are dropped, but those before an answer without thinking. Held back is only what may be the
    beginning of a marker, and blanks that may be the end of the thinking.

    has_thought: whether the thinking has begun.  is_over: whether all text from here on is the answer.
    starts_marked: True if the answer starts with the text that ended the thinking.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._pending = ""
        self._is_inside = self.has_thought = thinking.inside
        self.starts_marked = False
        self._ends = ((thinking.close, ""), *thinking.ends)
        self._in_answer = False
        self._drops_blanks = thinking.inside and not thinking.begun

    @property
    def is_over(self) -> bool:
        """True if all text from here on is the answer."""
        return self._in_answer and not self._drops_blanks

    @property
    def in_answer(self) -> bool:
        """True if the thinking has ended, or there is none."""
        return self._in_answer

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return the thinking and the answer that are new."""
        if not self._in_answer:
            text, self._pending = self._pending + text, ""
        if not self._in_answer and not self._is_inside:
            text = self._opened(text)
        thinking = ""
        if self._is_inside:
            thinking, text = self._thought(text)
        return thinking, self._answered(text)

    def flush(self) -> tuple[str, str]:
        """Return what is held back, when no more comes. A marker of several tokens that is not complete is no text."""
        rest, self._pending = self._pending, ""
        if self._is_inside:
            return _without_begun(rest, [dropped + following for dropped, following in self._ends]).rstrip(), ""
        return "", _without_begun(rest, [self._thinking.open, self._thinking.answer])

    def _opened(self, text: str) -> str:
        """Return the text after the marker that it begins with, if any; hold back what may be one."""
        start, markers = text.lstrip(), [each for each in (self._thinking.open, self._thinking.answer) if each]
        found = next((marker for marker in markers if start.startswith(marker)), None)
        if found is None and any(marker.startswith(start) for marker in markers):
            self._pending = text
            return ""
        if found == self._thinking.open:
            self._is_inside = self.has_thought = self._drops_blanks = True
        else:
            self._in_answer, self._drops_blanks = True, found is not None
        return text if found is None else start[len(found) :]

    def _thought(self, text: str) -> tuple[str, str]:
        """Return the thinking in a text, and the text after its end."""
        if self._drops_blanks:
            text = text.lstrip()
        found = [
            (at, dropped, following) for dropped, following in self._ends if (at := text.find(dropped + following)) >= 0
        ]
        if found:
            at, dropped, following = min(found)
            self._is_inside, self._in_answer, self._drops_blanks = False, True, True
            self.starts_marked = bool(following)
            return text[:at].rstrip(), text[at + len(dropped) :]
        begun = max(_partial_length(text, dropped + following) for dropped, following in self._ends)
        visible = text[: len(text) - begun].rstrip()
        self._pending = text[len(visible) :]
        if visible:
            self._drops_blanks = False
        return visible, ""

    def _answered(self, text: str) -> str:
        if self._in_answer and self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        return text


def _partial_length(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may begin a marker."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)


def _without_begun(text: str, markers: Sequence[str]) -> str:
    """Return a text without the beginning of a marker at its end, if that has the marker's first tag and more follows
    the tag in the marker: a control token, not text."""
    for marker in markers:
        length = _partial_length(text, marker)
        tag = _TAG.match(marker)
        if tag is not None and len(tag[0]) <= length:
            return text[: len(text) - length]
    return text


_TAG = re.compile(r"<[^<>]+>")


class TextMask(TokenMask, Protocol):
    """A TokenMask that knows text ahead."""

    def forced_text(self, count: int) -> bytes:
        """The text after the first `count` tokens as far as there is no choice; b"" where there is one."""


class ThinkingMask:
    """The mask of an answer that may begin with thinking: anything while it thinks, up to the budget, then the closing
    marker; `answer` from there on, or anything without one. An answer with a mask cannot end before it begins.

    vocab_size: logits that the model gives per token.  ends: ids that end an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        vocab_size: int,
        ends: Sequence[int] = (),
        answer: TextMask | None = None,
    ) -> None:
        assert params.thinking is not None, "there is no thinking to mask"
        self._thinking = params.thinking
        self._tokenizer = tokenizer
        self._params = params
        self._answer = answer
        self._size_bytes = -(-vocab_size // 32) * 4
        self._any = (1 << vocab_size) - 1
        self._any_but_ends = self._any & ~sum(1 << each for each in set(ends)) if answer is not None else self._any
        self._open_ids = self._ids(self._thinking.open)
        self._close_ids = self._ids(self._thinking.close)
        self._blank_ids = {ids[0] for blanks in ("\n", "\n\n") if len(ids := self._ids(blanks)) == 1}
        self._followed = 0  # tokens that the answer's mask has, or that stand before it
        self.restart(())

    @property
    def is_complete(self) -> bool:
        """True if nothing may come but the answer's end."""
        return self._answer_from is not None and self._answer is not None and self._answer.is_complete

    @property
    def error(self) -> str:
        """Why nothing is allowed any more; "" while anything is."""
        return self._answer.error if self._answer is not None and self._answer_from is not None else ""

    def bitmask(self) -> bytes:
        """Return the tokens that may come next."""
        if self._answer_from is not None:
            return self._with(self._answer_bits(), self._blank_ids if self._may_skip else ())
        if not self._splitter.has_thought:
            begun = len(self._tokens)
            opens = self._open_ids[begun : begun + 1]
            may_answer = self._answer is None or self._followed == begun
            return self._with(self._answer_bits() if may_answer else bytes(self._size_bytes), opens)
        if self._is_over_budget:
            return self._with(bytes(self._size_bytes), self._close_ids[self._forced : self._forced + 1])
        return self._any_but_ends.to_bytes(self._size_bytes, "little")

    def accept(self, token_id: int) -> None:
        """Advance by a token."""
        self._take(token_id)
        if self._answer is None:
            return
        if self._answer_from is not None:
            for each in self._tokens[max(self._followed, self._answer_from) :]:
                self._answer.accept(each)
            self._followed = len(self._tokens)
        elif not self._splitter.has_thought:
            self._follow_opening(self._answer, len(self._tokens) - 1)
        elif self._followed:
            self._answer.restart([])
            self._followed = 0

    def restart(self, generated: Sequence[int]) -> None:
        """Move to where the answer is after these tokens."""
        self._tokens: list[int] = []
        self._splitter = ThinkingSplitter(self._thinking)
        self._detokenizer = IncrementalDetokenizer(
            self._tokenizer, skip_special_tokens=self._params.skip_special_tokens, shown=self._params.shown_token_ids
        )
        self._answer_from: int | None = None
        self._thought = self._forced = 0
        self._followed = 0
        self._starts: list[int] = []
        self._length = 0
        self._may_skip = False  # blanks between the thinking and an answer whose grammar has none there
        for token_id in generated:
            self._take(token_id)
        if self._answer is not None:
            self._restart_answer(self._answer)

    def forced_text(self, count: int) -> bytes:
        """The text after the first `count` tokens as far as there is no choice."""
        if self._answer is None or self._answer_from is None:
            return b""
        return self._answer.forced_text(count - self._answer_from)

    @property
    def _is_over_budget(self) -> bool:
        budget = self._thinking.budget
        return budget is not None and self._thought >= budget and self._forced < len(self._close_ids)

    def _take(self, token_id: int) -> None:
        """Follow one token; `_answer_from` is the number of the answer's first token once that is known."""
        self._tokens.append(token_id)
        if self._answer_from is not None:
            self._answer_from += self._may_skip and token_id in self._blank_ids
            self._may_skip = False
            return
        if self._splitter.has_thought:
            self._forced += self._is_over_budget
            self._thought += 1
        text = self._detokenizer.push(token_id)
        self._starts.append(self._length)
        self._length += len(text)
        _, answer = self._splitter.push(text)
        if self._splitter.starts_marked:
            self._answer_from = bisect_right(self._starts, self._length - len(answer)) - 1
        elif self._splitter.in_answer:
            self._may_skip = self._splitter.has_thought
            self._answer_from = len(self._tokens) if self._may_skip else 0
        elif (
            self._answer is not None
            and not self._splitter.has_thought
            and self._tokens != self._open_ids[: len(self._tokens)]
        ):
            self._answer_from = 0

    def _restart_answer(self, answer: TextMask) -> None:
        answer.restart([] if self._answer_from is None else self._tokens[self._answer_from :])
        if self._answer_from is not None:
            self._followed = len(self._tokens)
        elif not self._splitter.has_thought:
            for index in range(len(self._tokens)):
                self._follow_opening(answer, index)

    def _follow_opening(self, answer: TextMask, index: int) -> None:
        """Advance the answer's mask by a token that may be of the opening marker: an answer can begin as the marker
        does (`<tool_call>` and `<think>`), and both stay possible until one is excluded."""
        token_id = self._tokens[index]
        if self._followed == index and answer.bitmask()[token_id // 8] >> token_id % 8 & 1:
            answer.accept(token_id)
            self._followed += 1

    def _answer_bits(self) -> bytes:
        if self._answer is not None:
            return self._answer.bitmask()
        return self._any.to_bytes(self._size_bytes, "little")

    def _with(self, bits: bytes, more: Iterable[int]) -> bytes:
        """Return the bits with those of more tokens."""
        added = bytearray(bits)
        for token_id in more:
            added[token_id // 8] |= 1 << token_id % 8
        return bytes(added)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
