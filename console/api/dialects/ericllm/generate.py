"""POST /generate: the endpoint of EricLLM, and of vLLM's demo server.

The answer is {"text": prompt + completion}: a list, as vLLM gives it, to a body with a field that vLLM's clients always
send (`n`, `stream`) or that EricLLM does not know (`best_of`, `ignore_eos`), and for several prompts; else a string, as
EricLLM gives it. A body with a field that EricLLM alone knows (`token_repetition_penalty`, `top_a`) asks for one answer
as a string whatever else it has.

With `stream` every line is a JSON object {"text": [...]} that holds all texts so far, as vLLM's demo server sends them;
a failure is a last line {"error": {...}}. Where an answer ran out of time, finish_reason says so, for one or for each;
neither of the two has that field, so it is given in no other case.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated

import msgspec
from aiohttp import web
from pydantic import AfterValidator, Field

from console.api.context import ApiContext, new_id
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.generation import Generation, WhyField
from console.api.requests.parameters import DEFAULT_LENGTH, SAMPLING_CLAMPED, SAMPLING_REFUSED, Refusal
from console.api.requests.prompts import count_prompts, negative_prompt_ids, read_prompts
from console.api.requests.sampling import SamplingFields, limit_length, sampling_params
from console.api.requests.schemas import ANSWER_TOKENS, PROMPTS, describes
from console.api.requests.stream import JSON_LINES, ChunkStream
from engine.backends.base import FinishReason
from engine.errors import InvalidRequest

_VLLM_FIELDS = frozenset({"n", "stream", "best_of", "ignore_eos"})
_ERICLLM_FIELDS = frozenset({"token_repetition_penalty", "top_a"})


_REFUSED: Mapping[str, Refusal] = {
    **SAMPLING_REFUSED,
    "filters": Refusal("use stop"),
    "logprobs": Refusal("use /v1/completions for log-probabilities"),
}

_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_tokens": DEFAULT_LENGTH,
    "top_a": "1 means 0, off",
}


class GenerateBody(SamplingFields):
    """A generation request, with EricLLM's defaults. prompt: as /v1/completions takes it.

    token_repetition_penalty: EricLLM's name for repetition_penalty, which vLLM's clients send.
    top_a: EricLLM's clients send its default, 1.0, which never did anything; so it is off here too.
    """

    refused = _REFUSED
    inert = frozenset({"request_id"})
    clamped = _CLAMPED

    prompt: Annotated[object, PROMPTS]
    max_tokens: Annotated[int, ANSWER_TOKENS] = 128
    temperature: float | None = 0.7
    top_k: Annotated[int | None, Field(ge=-1)] = 40
    top_p: float | None = 0.5
    min_p: float | None = 0.0
    typical_p: float | None = 1.0
    top_a: Annotated[float, AfterValidator(lambda top_a: 0.0 if top_a == 1 else top_a)] = 0.0
    token_repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100.0)] = None

    @property
    def asks_for_string(self) -> bool:
        """True if the answer is one string, as EricLLM's clients read it; vLLM's clients read a list."""
        from_vllm = self.model_fields_set & _VLLM_FIELDS and not self.model_fields_set & _ERICLLM_FIELDS
        return self.n == 1 and isinstance(self.prompt, str) and not from_vllm


_EXAMPLE = {"prompt": "Once upon a time", "max_tokens": 16}

Finishes = list[FinishReason | None]


class GenerateText(msgspec.Struct, frozen=True):
    """The answer, and each line of a stream.

    text: a string to EricLLM's clients, a list to vLLM's, for several prompts or answers, and in a stream.
    finish_reason: where any answer ran out of time, why each one ended.
    why: what the time went into, where requested.
    """

    text: str | list[str]
    finish_reason: FinishReason | Finishes | msgspec.UnsetType | None = msgspec.UNSET
    why: WhyField = msgspec.UNSET


class Generate:
    """POST /generate."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/generate", self._post)]

    @describes(
        "Complete a text (EricLLM, vLLM demo server)",
        body=GenerateBody,
        answer=GenerateText,
        event=GenerateText,
        media=JSON_LINES.content_type,
        example=_EXAMPLE,
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = _one_penalty(await read(request, GenerateBody))
        body = limit_length(body, "max_tokens", self._context.settings.max_output_tokens)
        model = await self._context.served_model(request, body, JSON_LINES if body.stream else None)
        negative_ids = await negative_prompt_ids(body, model)
        params = sampling_params(body, model, max_tokens=body.max_tokens, negative_prompt_ids=negative_ids)
        self._context.check_choices(count_prompts(body.prompt), body.n)
        prompts = await read_prompts(body.prompt, model)
        self._context.check_echo(prompts, body.n, each_time=body.stream)
        starts = [prompt.text for prompt in prompts for _ in range(body.n)]
        async with self._context.generate(request, new_id("gen"), body, model, prompts, params) as generation:
            if body.stream:
                async with ChunkStream(request, self._context.settings, JSON_LINES) as chunks:
                    await _send(generation, starts, chunks)
                return chunks.response
            answers = await generation.answers()
            texts = [start + answer.text for start, answer in zip(starts, answers, strict=True)]
            whole = _so_far(texts, [answer.finish for answer in answers], generation.why)
            return json_response(_first(whole) if body.asks_for_string else whole)


async def _send(generation: Generation, texts: list[str], chunks: ChunkStream) -> None:
    """Send a line with all texts so far for each delta with text or an end."""
    finishes: Finishes = [None] * len(texts)
    async with aclosing(generation.deltas()) as deltas:
        async for i, delta in deltas:
            texts[i] += delta.text
            finishes[i] = delta.finish
            if delta.text or delta.finish:
                await chunks.send(_so_far(texts, finishes, generation.why))


def _so_far(texts: list[str], finishes: Finishes, why: WhyField) -> GenerateText:
    return GenerateText(texts, finishes if "timeout" in finishes else msgspec.UNSET, why)


def _first(answer: GenerateText) -> GenerateText:
    """Return the only answer, without lists around its parts."""
    finish = answer.finish_reason
    return GenerateText(answer.text[0], finish[0] if isinstance(finish, list) else finish, answer.why)


def _one_penalty(body: GenerateBody) -> GenerateBody:
    """Return the body with its penalty under one name; raises InvalidRequest for fields that disagree."""
    ours, theirs = body.repetition_penalty, body.token_repetition_penalty
    if ours is not None and theirs is not None and ours != theirs:
        raise InvalidRequest(
            "token_repetition_penalty and repetition_penalty differ; send one of them", param="token_repetition_penalty"
        )
    penalty = ours if theirs is None else theirs
    return body.model_copy(update={"repetition_penalty": 1.0 if penalty is None else penalty})
