"""Usage, log-probabilities of prompts and timestamps, as OpenAI's completions and chat answer with them."""

from __future__ import annotations

import time

import msgspec

from console.api.requests.chat_body import OpenAiFields
from console.api.requests.generation import Generation, WhyField
from console.api.requests.logprobs import PromptLogprobs, prompt_logprobs
from console.api.requests.served_model import ServedModel
from engine.backends.base import unpack_logprobs


class PromptDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: those of the answer's tokens that are thinking."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens that a request used. why: what its time went into, where requested."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    why: WhyField = msgspec.UNSET


TokenIds = list[int] | msgspec.UnsetType
"""Ids of a prompt or an answer, where requested."""

UsageField = Usage | msgspec.UnsetType | None
"""Absent from chunks, or, where requested, null in all but the last, or in each the usage so far."""


def usage_of(generation: Generation) -> Usage:
    """Return the tokens that the generation used so far, and at its end what its time went into."""
    tokens = generation.tokens
    return Usage(
        prompt_tokens=tokens.prompt,
        completion_tokens=tokens.output,
        total_tokens=tokens.prompt + tokens.output,
        prompt_tokens_details=PromptDetails(tokens.cached),
        completion_tokens_details=CompletionDetails(tokens.thinking),
        why=generation.why,
    )


def usage_so_far(fields: OpenAiFields, generation: Generation) -> UsageField:
    """Return the usage that chunks before the last one carry."""
    if fields.stream_options is not None and fields.stream_options.continuous_usage_stats:
        return usage_of(generation)
    return None if fields.include_usage else msgspec.UNSET


def prompt_logprobs_of(packed: bytes, model: ServedModel, fields: OpenAiFields) -> PromptLogprobs | msgspec.UnsetType:
    """Return the log-probabilities of a prompt, UNSET where vLLM's field for them was not sent."""
    top = fields.prompt_logprobs
    return msgspec.UNSET if top is None else prompt_logprobs(unpack_logprobs(packed), model.tokenizer, top)


def now() -> int:
    """Return the unix time in whole seconds, for `created`."""
    return int(time.time())
