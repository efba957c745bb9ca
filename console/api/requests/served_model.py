"""The model of one HTTP request: its name, tokenizer and limits, the same from start to end."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from console.api.http.serial_thread import SerialThread
from console.api.version import product_version
from engine.backends.base import LoadedModel
from engine.config import format_number
from engine.engine import Serving
from engine.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoModelLoaded
from engine.requests.causes import Cause
from engine.snapshot import ModelStatus
from engine.text.tokenizer import Tokenizer, TokenSpan
from engine.text.tokenizer_config import GenerationDefaults

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters: a shorter text, of which one character may become 18, is tokenized in 60 ms at worst."""

MANY_TOKENS = 4096

MAX_COUNTED_TOKENS = 2**18
"""Tokens of a text that is counted, where the context has fewer: the tokenizer takes 140 bytes for each."""

_PIECE = 32_768
"""Characters that are tokenized at once to check a long text for too many tokens."""

_SPARE = 64
"""Max tokens that a part of a text has beyond those it has within the text: its ends are tokenized differently."""

RETRY_LOADING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is ready. name: in answers; the client's own name of it, if any.

    requested_name: the client's name of it, "" for none.  key, adapter: as in GenerateRequest.
    thread: for work that holds the interpreter for long.  client: the sender of the request.
    shares_system: True if its workers share computed system prompts among all clients.
    thinking: the format of its thinking: "auto", "off", or a name of `engine.text.thinking`.
    sampling, max_input_len: as in ModelSpec.
    waited: seconds until it was ready, by cause.  unloads: models that left memory for a load that the request waited
    for.
    """

    name: str
    requested_name: str
    key: str
    adapter: str
    loaded: LoadedModel
    tokenizer: Tokenizer
    thread: SerialThread
    client: str = ""
    shares_system: bool = False
    thinking: str = "auto"
    sampling: Mapping[str, float] = field(default_factory=dict)
    max_input_len: int | None = None
    waited: Mapping[Cause, float] = field(default_factory=dict)
    unloads: Sequence[str] = ()

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Return the sampling of requests that leave it open: the operator's, else that of the model's makers."""
        return self.tokenizer.generation_defaults.with_values(self.sampling)

    @property
    def fingerprint(self) -> str:
        """Digest of all that an answer depends on besides its request."""
        loaded = self.loaded
        computed = (loaded.backend, loaded.dtype, loaded.attention, loaded.linear, *loaded.devices)
        text = "\n".join((product_version(), self.key, self.adapter, *computed))
        return f"fp_{hashlib.blake2s(text.encode(), digest_size=5).hexdigest()}"

    async def offload(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread."""
        return await self.thread.run(work, self.client)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the ids of each text; long ones are tokenized in a thread, without the interpreter's lock.

        max_tokens: of each, where they are to be no prompt, which the context bounds.
        Raises ContextLengthExceeded, before most of the work, for a text that has far more.
        """
        if sum(map(len, texts)) < LONG_TEXT and self.tokenizer.is_quick:
            return self.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens, max_tokens)

    async def part(self, text: str, tokens: int, *, end: bool = False) -> str:
        """Return the beginning, or the end, of a text that is to be truncated: `tokens` tokens and some to spare. It is
        found in a thread, at the cost of these tokens."""
        if tokens > self.loaded.max_model_len:
            return text
        characters = tokens * self.tokenizer.longest_token
        text = text[-characters:] if end else text[:characters]
        if not _could_have_many(text, tokens):
            return text
        return await asyncio.to_thread(self._part, text, tokens, end)

    def _part(self, text: str, tokens: int, end: bool) -> str:
        length, left = 0, tokens + _SPARE // 2
        while left > 0 and length < len(text):
            until = len(text) - length
            piece = text[max(0, until - _PIECE) : until] if end else text[length : length + _PIECE]
            part, count = self.tokenizer.cut(piece, left, end=end)
            length, left = length + len(part), left - count
        return text[len(text) - length :] if end else text[:length]

    async def count(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that is no prompt, and so may be longer than one. Raises InvalidRequest."""
        [ids] = await self.encode([text], add_special_tokens=add_special_tokens, max_tokens=self._max_counted)
        return ids

    async def spans(self, text: str) -> list[TokenSpan]:
        """Return the tokens of such a text with their places in it; raises as `count` does."""
        if len(text) < MANY_TOKENS and self.tokenizer.is_quick:
            return self.tokenizer.spans(text)
        return await asyncio.to_thread(self._spans, text)

    @property
    def _max_counted(self) -> int:
        return max(self.loaded.max_model_len, MAX_COUNTED_TOKENS)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, max_tokens: int | None) -> list[list[int]]:
        for text in texts:
            self._refuse_endless(text, max_tokens)
        return self.tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)

    def _spans(self, text: str) -> list[TokenSpan]:
        self._refuse_endless(text, self._max_counted)
        return self.tokenizer.spans(text)

    async def decode(self, token_ids: list[int], param: str) -> str:
        """Return the text of a prompt of ids; long ones are decoded in a thread.

        Raises InvalidRequest naming `param` for an id that the model has no token for, and ContextLengthExceeded,
        before the work, for more of them than can fit.
        """
        self.check_fits(len(token_ids))
        self.check_token_ids(token_ids, param)
        if len(token_ids) < MANY_TOKENS:
            return self.tokenizer.decode(token_ids)
        return await self.offload(partial(self.tokenizer.decode, token_ids))

    def _refuse_endless(self, text: str, max_tokens: int | None) -> None:
        """Raise ContextLengthExceeded for a prompt of too many tokens, InvalidRequest for more than `max_tokens`. Where
        the length alone does not say so, a text that is long for that is tokenized a piece at a time: all at once, what
        the tokenizer makes of eight MiB takes more than one GiB."""
        most = self.loaded.max_model_len if max_tokens is None else max_tokens
        least = len(text) // self.tokenizer.longest_token
        starts = range(0, len(text), _PIECE) if least <= most and _could_have_many(text, most) else ()
        counted = 0
        for start in starts:
            [ids] = self.tokenizer.encode_all([text[start : start + _PIECE]], add_special_tokens=False)
            counted += max(0, len(ids) - _SPARE)
            if counted > most:
                least = counted
                break
        if least > most and max_tokens is not None:
            raise InvalidRequest(f"the text has more than {most} tokens, the limit", param="prompt")
        if least > most:
            raise ContextLengthExceeded(
                f"prompt too long: at least {least:,} tokens, limit {most - 1:,} (context {most:,} minus 1)",
                param="prompt",
                prompt_tokens=least,
                at_least=True,
                limit=most - 1,
                max_model_len=most,
            )

    def check_fits(self, tokens: int) -> None:
        """Raise ContextLengthExceeded for a prompt of more tokens than can fit."""
        if tokens > (most := self.loaded.max_model_len):
            raise ContextLengthExceeded(
                f"prompt too long: {tokens:,} tokens, limit {most - 1:,} (context {most:,} minus 1)",
                param="prompt",
                prompt_tokens=tokens,
                limit=most - 1,
                max_model_len=most,
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for an id that the model has no token for."""
        last = self.loaded.vocab_size - 1
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= last):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= last)
            raise InvalidRequest(
                f"{param} has token {format_number(wrong)}; the model has tokens 0 to {last}", param=param
            )

    def check_length(self, entries: int, param: str) -> None:
        """Raise InvalidRequest for more entries than the context holds tokens, of which each takes one at least."""
        if entries > (most := self.loaded.max_model_len):
            raise InvalidRequest(f"{param} has {entries} entries; the model's context holds {most} tokens", param=param)


def _could_have_many(text: str, tokens: int) -> bool:
    """Return whether a text is so long that it may have far more tokens than these: each byte may be one."""
    return len(text.encode(errors="replace")) > max(2 * tokens, _PIECE)


def adapter_of(serving: Serving, lora: str | None) -> str:
    """Return the adapter of a request, "" for none: the one that `lora` names, else that of the model's name.

    Raises ModelNotFound where the model lacks it, and InvalidRequest where its backend takes none per request.
    """
    if not lora:
        return serving.adapter
    if serving.adapter and serving.adapter != lora:
        raise InvalidRequest("lora and model name different adapters; send one of them", param="lora")
    if not serving.model.adapters_per_request:
        same = f"the adapter {serving.spec.lora.name}" if serving.spec.lora is not None else "no adapter"
        raise InvalidRequest(
            f"the {serving.model.backend} backend has no adapters per request: {serving.name} always uses {same}",
            param="lora",
        )
    if lora not in serving.adapters:
        available = ", ".join(serving.adapters)
        raise ModelNotFound(
            f"{serving.name} has no adapter {lora!r}; available: {available or 'none'}",
            param="lora",
            model=lora,
            available=available,
        )
    return lora


def not_ready(status: ModelStatus) -> NoModelLoaded:
    """Return the error about the state of the model."""
    sentence = "No model is loaded"
    if status.state == "failed" and status.error is not None:
        sentence = "No model is loaded: the last load failed"
    elif status.state != "unloaded" and status.spec is not None:
        sentence = f"The model {status.spec.name} is {status.state}"
    elif status.state != "unloaded":
        sentence = f"The model is {status.state}"
    return NoModelLoaded(sentence, state=status.state, retry_after_s=RETRY_LOADING_S)
