"""Log-probabilities in OpenAI's two shapes: the chat one (with bytes) and the completions one (with offsets)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.backends.base import TokenLogprob
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer

LOWEST = -9999.0
"""OpenAI's value for a probability of zero; JSON has no infinity."""


class TopLogprob(msgspec.Struct, frozen=True):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest at its place. bytes: its part of the text, maybe of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one choice or chunk."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one choice or chunk, as parallel lists.

    text_offset: characters, from the start of the choice's text.

    The first token of a prompt came after nothing: it has null in place of what others have.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or an alternative to one, as vLLM has it. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for every token of the prompt; null for the first."""


class TextOffsets:
    """Where each token of a text begins, in characters: tokens that share a character all begin with it.

    text: what makes the text, before its first token.  start: characters before the text.
    within: the text, where it is known before: control tokens that are not written in it take no room.
    """

    def __init__(
        self, tokenizer: Tokenizer, text: IncrementalDetokenizer, *, start: int = 0, within: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._start = self._at = start
        self._within = within

    @classmethod
    def in_text(cls, text: str, tokenizer: Tokenizer) -> TextOffsets:
        """Offsets of tokens within a text."""
        return cls(tokenizer, IncrementalDetokenizer(tokenizer, skip_special_tokens=False), within=text)

    def push(self, token_id: int) -> int:
        """Return the offset of the next token, `token_id`."""
        at = self._at
        if token_id not in self._tokenizer.special_ids or self._continues_with(self.text_of(token_id)):
            unwritten = self._unwritten(token_id)
            self._at += len(self._text.push(token_id)) - unwritten
        return at

    def text_of(self, token_id: int) -> str:
        """Return what `token_id` would add as the next token; U+FFFD for part of a character."""
        text = _decode(self._text.bytes_of(token_id))
        return text[1:] if self._unwritten(token_id) else text

    def _unwritten(self, token_id: int) -> bool:
        """Return whether the token begins with a space that SentencePiece itself put after a control token."""
        text = _decode(self._text.bytes_of(token_id))
        return text.startswith(" ") and not self._continues_with(text) and self._continues_with(text[1:])

    def _continues_with(self, piece: str) -> bool:
        """Return whether the text continues like this, as far as the text reaches."""
        return self._within is None or self._within.startswith(piece, self._at - self._start)


def chat_logprobs(records: Sequence[TokenLogprob], text: IncrementalDetokenizer) -> ChatLogprobs:
    """Return `records` in the shape of chat. text: before their tokens."""
    return ChatLogprobs([_chat_logprob(record, text) for record in records])


def completion_logprobs(
    token_ids: Sequence[int],
    records: Sequence[TokenLogprob | None],
    *,
    offsets: TextOffsets,
    top: int,
) -> CompletionLogprobs:
    """Return `records` in the shape of completions, one for each token. offsets: before the first of them.

    top: how many alternatives were asked for, 0 for none; the token itself is among them, as OpenAI has it.
    """
    found = CompletionLogprobs([], [], [], [])
    for token_id, record in zip(token_ids, records, strict=True):
        found.tokens.append(offsets.text_of(token_id))
        found.token_logprobs.append(None if record is None else _finite(record.logprob))
        if top:
            found.top_logprobs.append(None if record is None else _alternatives(record, offsets, top))
        found.text_offset.append(offsets.push(token_id))
    return found


def join_logprobs(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Return both, one after the other; None without any."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(records: Sequence[TokenLogprob | None], tokenizer: Tokenizer, top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt in vLLM's shape: each token, then its `top` alternatives."""
    return [None if record is None else _by_id(record, tokenizer, top) for record in records]


def _by_id(record: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, PromptLogprob]:
    own = {str(record.token_id): PromptLogprob(_finite(record.logprob), record.rank, _text(record.token_id, tokenizer))}
    others = {
        str(token_id): PromptLogprob(_finite(logprob), place, _text(token_id, tokenizer))
        for place, (token_id, logprob) in enumerate(record.top[:top], 1)
    }
    return own | others | own


def _chat_logprob(record: TokenLogprob, text: IncrementalDetokenizer) -> ChatLogprob:
    top = [(text.bytes_of(token_id), _finite(logprob)) for token_id, logprob in record.top]
    raw = text.bytes_of(record.token_id)
    text.push(record.token_id)
    return ChatLogprob(
        token=_decode(raw),
        logprob=_finite(record.logprob),
        bytes=list(raw),
        top_logprobs=[TopLogprob(_decode(other), logprob, list(other)) for other, logprob in top],
    )


def _alternatives(record: TokenLogprob, offsets: TextOffsets, top: int) -> dict[str, float]:
    found = {offsets.text_of(token_id): _finite(logprob) for token_id, logprob in record.top[:top]}
    return found | {offsets.text_of(record.token_id): _finite(record.logprob)}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return _decode(tokenizer.token_bytes(token_id))


def _decode(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
