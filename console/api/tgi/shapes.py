"""TGI's answers, as JSON has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from console.api.logprobs import LOWEST
from engine.backends.base import FinishReason, TokenLogprob
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

TgiFinish = Literal["length", "eos_token", "stop_sequence"]


class Token(msgspec.Struct, frozen=True):
    """A token of an answer. text: what it adds; the end of a character has all of it.  special: a control token."""

    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(msgspec.Struct, frozen=True):
    """A token of the prompt. logprob: None for the first, which nothing stands before."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of several, which was not the best. seed: None where the client set none."""

    generated_text: str
    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """All about an answer. top_tokens, best_of_sequences: where asked for."""

    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. details: where asked for."""

    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a stream tells. input_length: tokens of the prompt."""

    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream. index: from 1.  generated_text, details: in the last, the latter where asked for."""

    index: int
    token: Token
    top_tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """GET /info. max_input_length is what older versions of TGI call max_input_tokens."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_input_length: int
    max_total_tokens: int
    validation_workers: int = 1
    max_client_batch_size: int = 1
    router: str = "ericllm"
    version: str
    sha: str | None = None
    docker_label: str | None = None


class SimpleToken(msgspec.Struct, frozen=True):
    """A token of a text that was tokenized. start, stop: characters."""

    id: int
    text: str
    start: int
    stop: int


class TokenTexts:
    """Tokens of one text, of an answer say, with what each adds to it, in the order of their coming.

    Control tokens that are not shown in the text have their names.  text: what makes it, before its first token.
    """

    def __init__(self, tokenizer: Tokenizer, text: IncrementalDetokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = text

    def next(self, record: TokenLogprob) -> tuple[Token, list[Token]]:
        """The next one, and what could have stood at its place, the likeliest first."""
        likeliest = [
            self._shaped(id_, self._text.bytes_of(id_).decode(errors="replace"), logprob) for id_, logprob in record.top
        ]
        return self._shaped(record.token_id, self.text_of(record.token_id), record.logprob), likeliest

    def text_of(self, token_id: int) -> str:
        """What the next token adds."""
        name = self._text.bytes_of(token_id).decode() if token_id in self._tokenizer.special_ids else ""
        return self._text.push(token_id) or name

    def _shaped(self, token_id: int, text: str, logprob: float) -> Token:
        return Token(token_id, text, max(logprob, LOWEST), token_id in self._tokenizer.special_ids)


def finish_of(finish: FinishReason | None, last_token: int | None, tokenizer: Tokenizer) -> TgiFinish:
    """Why an answer ended, in TGI's words; one that ran out of time was cut off, as one that was long enough is."""
    if finish != "stop":
        return "length"
    return "eos_token" if last_token in tokenizer.eos_token_ids else "stop_sequence"


def prefill(ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> list[PrefillToken]:
    """A prompt's tokens. logprobs: one for each."""
    texts = TokenTexts(tokenizer, IncrementalDetokenizer(tokenizer))
    return [
        PrefillToken(id_, texts.text_of(id_), None if record is None else max(record.logprob, LOWEST))
        for id_, record in zip(ids, logprobs, strict=True)
    ]
