"""POST /v1/completions: OpenAI's text completion."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from console.api.body import read
from console.api.context import ApiContext, new_id
from console.api.errors import json_response
from console.api.generation import Generation
from console.api.logprobs import CompletionLogprobs, completion_logprobs
from console.api.openai import OpenAiFields, UsageField, now, usage_of
from console.api.parameters import COMPLETION_REFUSED, OPENAI_INERT
from console.api.prompts import Prompt, count_prompts, negative_prompt_ids, read_prompts
from console.api.sampling import sampling_params
from console.api.served import ServedModel
from console.api.stream import DONE, ChunkStream
from engine.backends.base import FinishReason, TokenLogprob
from engine.errors import InvalidRequest

OPENAI_MAX_TOKENS = 16


class CompletionBody(OpenAiFields):
    """What the endpoint takes. prompt: a string, token ids, or an array of either."""

    refused = COMPLETION_REFUSED
    inert = OPENAI_INERT

    prompt: object
    max_tokens: int = OPENAI_MAX_TOKENS
    logprobs: int | None = None
    echo: bool = False


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; also every chunk of a stream, where usage is left out, null, or (on the last) given."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageField = msgspec.UNSET


class Completions:
    """The endpoint."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.post("/v1/completions", self._post)]

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, CompletionBody)
        model = await self._context.served(body)
        _check_echo(body)
        params = sampling_params(
            body,
            model,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            negative_prompt_ids=await negative_prompt_ids(body, model),
        )
        self._context.check_choices(count_prompts(body.prompt), body.n)
        prompts = await read_prompts(body.prompt, model)
        call = _Call(body, model, prompts, body.include_usage)
        with self._context.generate(request, call.id, body, model, prompts, params) as generation:
            if not body.stream:
                return json_response(await call.whole(generation))
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


def _check_echo(body: CompletionBody) -> None:
    """Refuse to echo a prompt whose log-probabilities we lack."""
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo cannot be combined with logprobs: log-probabilities are given of the answer's tokens only",
            param="echo",
        )


class _Call:
    """One request on its way to its answer."""

    def __init__(self, body: CompletionBody, model: ServedModel, prompts: list[Prompt], include_usage: bool) -> None:
        self.id = new_id("cmpl")
        self._body = body
        self._model = model
        self._prompts = prompts
        self._include_usage = include_usage
        self._created = now()
        self._logprobs_text = [0] * (len(prompts) * body.n)

    async def whole(self, generation: Generation) -> Completion:
        """All answers at once."""
        answers = await generation.answers()
        choices = [
            CompletionChoice(i, self._echo(i) + answer.text, self._logprobs(i, answer.logprobs), answer.finish)
            for i, answer in enumerate(answers)
        ]
        return self._completion(choices, usage_of(generation))

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Every piece as it comes, then what ends the stream."""
        so_far = partial(self._body.usage_so_far, generation)
        if self._body.echo:
            for i in range(len(self._logprobs_text)):
                await chunks.send(self._completion([CompletionChoice(i, self._echo(i), None, None)], so_far()))
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                logprobs = self._logprobs(i, delta.logprobs)
                if delta.text or delta.logprobs or delta.finish:
                    choice = CompletionChoice(i, delta.text, logprobs, delta.finish)
                    await chunks.send(self._completion([choice], so_far()))
        if self._include_usage:
            await chunks.send(self._completion([], usage_of(generation)))
        await chunks.send_raw(DONE)

    def _echo(self, choice: int) -> str:
        return self._prompts[choice // self._body.n].text if self._body.echo else ""

    def _logprobs(self, choice: int, records: list[TokenLogprob]) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not records:
            return None
        offset = self._logprobs_text[choice]
        shaped = completion_logprobs(records, self._model.tokenizer, offset=offset, top=self._body.logprobs > 0)
        self._logprobs_text[choice] += sum(len(token) for token in shaped.tokens)
        return shaped

    def _completion(self, choices: list[CompletionChoice], usage: UsageField) -> Completion:
        return Completion(id=self.id, created=self._created, model=self._model.name, choices=choices, usage=usage)
