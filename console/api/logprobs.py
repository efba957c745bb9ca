"""Log-probabilities in OpenAI's two shapes: the chat one (with bytes) and the completions one (with offsets)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.backends.base import TokenLogprob
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
    """Those of one choice or chunk, as parallel lists. text_offset: characters, from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(records: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """The chat shape of `records`."""
    return ChatLogprobs([_chat_logprob(record, tokenizer) for record in records])


def completion_logprobs(
    records: Sequence[TokenLogprob], tokenizer: Tokenizer, *, offset: int, top: bool
) -> CompletionLogprobs:
    """The completions shape of `records`.

    offset: characters before the first token.  top: whether alternatives were asked for; the token itself is then
    among them, as OpenAI has it.
    """
    tokens = [_text(record.token_id, tokenizer) for record in records]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(record.logprob) for record in records],
        top_logprobs=[_alternatives(record, tokenizer) for record in records] if top else [],
        text_offset=offsets,
    )


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


def _alternatives(record: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    found = {_text(token_id, tokenizer): _finite(logprob) for token_id, logprob in record.top}
    return found | {_text(record.token_id, tokenizer): _finite(record.logprob)}


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
