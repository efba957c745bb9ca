"""What OpenAI's two dialects share: usage, stream options, and how a stream is told apart from a whole answer."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict

from console.api.requests.generation import Generation
from console.api.requests.logprobs import PromptLogprobs, prompt_logprobs
from console.api.requests.sampling import SamplingFields
from console.api.requests.served_model import ServedModel
from engine.backends.base import unpack_logprobs
from engine.errors import InvalidRequest


class PromptDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


UsageField = Usage | msgspec.UnsetType | None
"""Left out of chunks, or, where it was asked for, null in all of them but the last, or in each of them what was used so
far."""


class StreamOptions(BaseModel):
    """include_usage: send the usage as a last chunk.  continuous_usage_stats: as vLLM has it, with every chunk too.

    include_obfuscation: OpenAI pads chunks to one length where it is true; here they are never padded.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class OpenAiFields(SamplingFields):
    """Fields of both dialects besides sampling. prompt_logprobs: as vLLM has it, alternatives at each place of the
    prompt."""

    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None

    def check_prompt_logprobs(self) -> None:
        """Raise InvalidRequest where prompt_logprobs are asked for in a stream, whose chunks have no place for them."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not given in a stream", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage; raises InvalidRequest where there is no stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        return bool(self.stream_options.include_usage or self.stream_options.continuous_usage_stats)

    def usage_so_far(self, generation: Generation) -> UsageField:
        """What chunks before the last say."""
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            return usage_of(generation)
        return None if self.include_usage else msgspec.UNSET


def usage_of(generation: Generation) -> Usage:
    """What the generation used so far."""
    tokens = generation.tokens
    return Usage(
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.output,
        total_tokens=tokens.prompt + tokens.output,
        prompt_tokens_details=PromptDetails(tokens.cached),
    )


def prompt_logprobs_of(packed: bytes, model: ServedModel, fields: OpenAiFields) -> PromptLogprobs | msgspec.UnsetType:
    """What is told of a prompt, where vLLM's field for it was asked for."""
    top = fields.prompt_logprobs
    return msgspec.UNSET if top is None else prompt_logprobs(unpack_logprobs(packed), model.tokenizer, top)


def now() -> int:
    """`created`: unix time in whole seconds."""
    return int(time.time())
