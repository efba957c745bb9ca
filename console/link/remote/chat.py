"""A chat with a distant instance: what /v1/chat/completions is sent, and what its events say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, get_args

import msgspec

from console.link.chat import ChatDelta, ChatMessage
from console.link.frames import from_plain
from console.link.remote.http import Instance, OutOfReach
from engine.backends.base import FinishReason
from engine.config import PARAMETERS, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer_config import GenerationDefaults

PATH = "/v1/chat/completions"
MAX_ANSWER = 2**22
"""Characters of one answer: a million tokens."""

_NEUTRAL = SamplingParams()
_ALWAYS = frozenset(GenerationDefaults.__struct_fields__)
"""Parameters that would be the model's defaults if they were left out."""

_NOT_SENT = ("dry_breaker_ids", "negative_prompt_ids", "shown_token_ids", "logprobs", "grammar", "thinking")
"""Tokens of a tokenizer that is elsewhere, and what a chat does not show or ask for."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _New(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _New = msgspec.field(default_factory=_New)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: _Count = 0
    prompt_tokens: _Count = 0


class _Chunk(msgspec.Struct):
    """An event of an answer, as far as it is shown."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


def chat_body(
    messages: Sequence[ChatMessage],
    params: SamplingParams,
    model: str,
    *,
    continue_answer: bool = False,
    enable_thinking: bool | None = None,
) -> dict[str, Any]:
    """The request. Raises InvalidRequest for parameters that cannot be sent."""
    for name in _NOT_SENT:
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(f"{name} is not available on a remote instance", param=name)
    sampling = {
        PARAMETERS[name].http_name: value
        for name in params.__struct_fields__
        if name not in _NOT_SENT and ((value := getattr(params, name)) != getattr(_NEUTRAL, name) or name in _ALWAYS)
    }
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return {
        "messages": [
            {"role": turn.role, "content": turn.content}
            | ({"reasoning_content": turn.thinking} if turn.thinking else {})
            for turn in messages
        ],
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        **({"model": model} if model else {}),
        **({"continue_final_message": True} if continue_answer else {}),
        **({} if enable_thinking is None else {"enable_thinking": enable_thinking}),
        **sampling,
    }


async def deltas(instance: Instance, body: Mapping[str, Any]) -> AsyncGenerator[ChatDelta, None]:
    """Yield the answer of the instance, with times as they are here. Raise OutOfReach for none, or an endless one."""
    stopwatch = _Stopwatch(asyncio.get_running_loop().time)
    length = 0
    async with aclosing(instance.events(PATH, body=body)) as events:
        async for event in events:
            try:
                chunk: _Chunk = from_plain(event, _Chunk)
            except msgspec.ValidationError:
                raise OutOfReach(f"{instance.address.name} sent an unreadable answer") from None
            usage = chunk.usage or _Usage()
            for choice in chunk.choices or ():
                text, thinking = choice.delta.content or "", choice.delta.reasoning_content or ""
                length += len(text) + len(thinking)
                if length > MAX_ANSWER:
                    raise OutOfReach(f"{instance.address.name} sends an answer of more than {MAX_ANSWER:,} characters")
                if text or thinking or choice.finish_reason:
                    yield stopwatch.delta(text, thinking, usage, choice.finish_reason)


class _Stopwatch:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first_at: float | None = None

    def delta(self, text: str, thinking: str, usage: _Usage, finish: str | None) -> ChatDelta:
        now, tokens = self._clock(), usage.completion_tokens
        if self._first_at is None:
            self._first_at = now
        decoding_s = now - self._first_at
        return ChatDelta(
            text=text,
            thinking=thinking,
            output_tokens=tokens,
            ttft_s=self._first_at - self._began,
            tokens_per_s=(tokens - 1) / decoding_s if decoding_s > 0 and tokens > 1 else None,
            finish=_reason(finish),
            prompt_tokens=usage.prompt_tokens,
        )


def _reason(text: str | None) -> FinishReason | None:
    """A reason that this version does not know is an end all the same."""
    reasons: tuple[FinishReason, ...] = get_args(FinishReason)
    return None if text is None else next((reason for reason in reasons if reason == text), reasons[0])
