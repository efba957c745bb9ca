"""Log-probabilities in OpenAI's two shapes: the chat one (with bytes) and the completions one (with offsets)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.backends.base import TokenLogprob
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What OpenAI writes for a probability of zero; JSON has no infinity."""


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token that came, and the likeliest at its place. bytes: what it adds to the text, part of a character maybe."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Those of one choice or chunk."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Those of one choice or chunk, as parallel lists. text_offset: characters, from the start of the choice's text.

    The first token of a prompt came after nothing: it has null in place of what others have.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token that stood at a place of the prompt, or could have, as vLLM tells of it. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for every token of the prompt; null for the first."""


class TextOffsets:
    """Where each token of a text begins, in characters: tokens that share a character all begin with it.

    start: characters before the text.  within: the text, where it is known before: control tokens that are not written
    in it take no room.  skip_special_tokens: whether none does, where it is not.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int = 0, within: str | None = None, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=within is None and skip_special_tokens)
        self._start = self._at = start
        self._within = within

    def push(self, token_id: int) -> int:
        """Where `token_id` begins, which comes next."""
        at = self._at
        if token_id not in self._tokenizer.special_ids or self._shows(_text(token_id, self._tokenizer)):
            piece = self._text.push(token_id)
            unwritten = piece.startswith(" ") and not self._shows(piece) and self._shows(piece[1:])
            self._at += len(piece) - unwritten  # SentencePiece puts a space of its own after control tokens
        return at

    def _shows(self, piece: str) -> bool:
        """Whether the text goes on like this, as far as it is known."""
        return self._within is None or self._within.startswith(piece, self._at - self._start)


def chat_logprobs(records: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """The chat shape of `records`."""
    return ChatLogprobs([_chat_logprob(record, tokenizer) for record in records])


def completion_logprobs(
    token_ids: Sequence[int],
    records: Sequence[TokenLogprob | None],
    tokenizer: Tokenizer,
    *,
    offsets: TextOffsets,
    top: int,
) -> CompletionLogprobs:
    """The completions shape of `records`, one for each token.

    top: how many alternatives were asked for, 0 for none; the token itself is among them, as OpenAI has it.
    """
    return CompletionLogprobs(
        tokens=[_text(token_id, tokenizer) for token_id in token_ids],
        token_logprobs=[None if record is None else _finite(record.logprob) for record in records],
        top_logprobs=[None if record is None else _alternatives(record, tokenizer, top) for record in records]
        if top
        else [],
        text_offset=[offsets.push(token_id) for token_id in token_ids],
    )


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Both, one after the other; None where there is none."""
    if first is None or second is None:
        return first or second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(records: Sequence[TokenLogprob | None], tokenizer: Tokenizer, top: int) -> PromptLogprobs:
    """vLLM's shape of what a prompt's tokens are told of with, the token itself first and then `top` alternatives."""
    return [None if record is None else _by_id(record, tokenizer, top) for record in records]


def _by_id(record: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, PromptLogprob]:
    own = {str(record.token_id): PromptLogprob(_finite(record.logprob), record.rank, _text(record.token_id, tokenizer))}
    others = {
        str(token_id): PromptLogprob(_finite(logprob), place, _text(token_id, tokenizer))
        for place, (token_id, logprob) in enumerate(record.top[:top], 1)
    }
    return own | others | own


def _chat_logprob(record: TokenLogprob, tokenizer: Tokenizer) -> ChatLogprob:
    raw = tokenizer.token_bytes(record.token_id)
    return ChatLogprob(
        token=raw.decode(errors="replace"),
        logprob=_finite(record.logprob),
        bytes=list(raw),
        top_logprobs=[
            TopLogprob(_text(token_id, tokenizer), _finite(logprob), list(tokenizer.token_bytes(token_id)))
            for token_id, logprob in record.top
        ],
    )


def _alternatives(record: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    found = {_text(token_id, tokenizer): _finite(logprob) for token_id, logprob in record.top[:top]}
    return found | {_text(record.token_id, tokenizer): _finite(record.logprob)}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
