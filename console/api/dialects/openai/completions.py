"""POST /v1/completions: OpenAI's text completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext, new_id
from console.api.dialects.openai.common import TokenIds, UsageField, now, prompt_logprobs_of, usage_of, usage_so_far
from console.api.requests.body import read
from console.api.requests.chat_body import OPENAI_INERT, OPENAI_REFUSED, OpenAiFields
from console.api.requests.generation import GeneratedAnswer, Generation, StoppedBy, best_of_each, respond
from console.api.requests.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    completion_logprobs,
    join_logprobs,
)
from console.api.requests.parameters import DEFAULT_LENGTH, SAMPLING_CLAMPED, Refusal
from console.api.requests.progress import PromptProgressField, prompt_progress_field
from console.api.requests.prompts import Prompt, count_prompts, negative_prompt_ids, read_prompts
from console.api.requests.sampling import limit_length, sampling_params
from console.api.requests.schemas import PROMPTS, describes
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import DONE, SSE, ChunkStream
from engine.backends.base import FinishReason, TokenLogprob, unpack_logprobs
from engine.config import SamplingParams

OPENAI_MAX_TOKENS = 16

_EXAMPLE = {"prompt": "Once upon a time", "max_tokens": 16}


_ALIASES = {
    **OpenAiFields.aliases,
    "grammar": "grammar_string",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
}
"""Names of our fields in text frontends, which send one body to servers of any kind."""


_REFUSED: Mapping[str, Refusal] = {
    **OPENAI_REFUSED,
    "add_bos_token": Refusal("prompts are tokenized with the model's own special tokens", (True,)),
    "grammar_retain_state": Refusal("a grammar is per request", (False,)),
    "memory": Refusal("put it into the prompt"),
    "trim_stop": Refusal("use include_stop_str_in_output", (True,)),
    "add_special_tokens": Refusal("prompts are tokenized with the model's own special tokens", (True,)),
    "suffix": Refusal("infilling is not supported"),
}

_CLAMPED: Mapping[str, str] = {**SAMPLING_CLAMPED, "max_tokens": DEFAULT_LENGTH}


class CompletionBody(OpenAiFields):
    """A completion request. prompt: a string, token ids, or an array of either.

    max_tokens: 0 returns only log-probabilities of the prompt.  echo: start each answer with the prompt, and its
    logprobs, if requested, with those of the prompt.
    """

    refused = _REFUSED
    inert = OPENAI_INERT
    clamped = _CLAMPED
    aliases = _ALIASES

    prompt: Annotated[object, PROMPTS]
    max_tokens: int = OPENAI_MAX_TOKENS
    logprobs: int | None = None
    echo: bool = False

    @property
    def describes_prompt(self) -> bool:
        """True if the request has a use for an answer without new tokens."""
        return self.echo or self.prompt_logprobs is not None

    @property
    def alternatives_in_prompt(self) -> int | None:
        """Alternatives per prompt token to compute, None for no log-probabilities of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((top for top in wanted if top is not None), default=None)


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a piece of it.

    stop_reason: vLLM's, the stop string or the id of the stop token that ended it; in a stream with the answer's end.
    token_ids, prompt_token_ids: where requested, the latter in the first piece.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StoppedBy | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; also every chunk of a stream, where usage is left out, null, or (on the last) given.

    system_fingerprint: of model and server; where it changes, answers to requests with a seed may change.
    prompt_progress: where requested, in chunks before the first token.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageField = msgspec.UNSET
    prompt_progress: PromptProgressField | msgspec.UnsetType = msgspec.UNSET


class Completions:
    """POST /v1/completions."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/v1/completions", self._post)]

    @describes("Complete a text", body=CompletionBody, answer=Completion, event=Completion, example=_EXAMPLE)
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, CompletionBody)
        body = limit_length(body, "max_tokens", self._context.settings.max_output_tokens)
        model = await self._context.served_model(request, body, SSE if body.stream else None)
        params = sampling_params(
            body,
            model,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.alternatives_in_prompt,
            negative_prompt_ids=await negative_prompt_ids(body, model),
            fewest_tokens=0 if body.describes_prompt else 1,
            ranks=True,
        )
        body.check_prompt_logprobs()
        self._context.check_choices(count_prompts(body.prompt), body.answers_each)
        truncation = body.truncation(model, max_tokens=body.max_tokens)
        prompts = await read_prompts(body.prompt, model, truncation=truncation)
        if body.echo:
            self._context.check_echo(prompts, body.n)
        call = _Call(body, model, prompts, params)
        async with self._context.generate(request, call.id, body, model, prompts, params) as generation:
            if not body.stream:
                return await call.answer(generation)
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


class _Call:
    """One request and its answer."""

    def __init__(self, body: CompletionBody, model: ServedModel, prompts: list[Prompt], params: SamplingParams) -> None:
        self.id = new_id("cmpl")
        self._body = body
        self._model = model
        self._prompts = prompts
        self._params = params
        self._include_usage = body.include_usage
        self._created = now()
        self._fingerprint = model.fingerprint
        self._offsets = [self._offsets_of(prompt) for prompt in prompts for _ in range(body.n)]

    async def answer(self, generation: Generation) -> web.Response:
        """Return all choices in one response."""
        answers = best_of_each(await generation.answers(), self._body.answers_each, self._body.n)
        usage = usage_of(generation)
        return await respond(answers, lambda: self._completion(self._choices(answers), usage), self._model)

    def _choices(self, answers: Sequence[GeneratedAnswer]) -> list[CompletionChoice]:
        return [
            CompletionChoice(
                i,
                self._echo(i) + answer.text,
                join_logprobs(self._echoed_logprobs(i, answer.prompt_logprobs), self._logprobs(i, answer.logprobs)),
                answer.finish,
                answer.stop_reason,
                prompt_logprobs_of(answer.prompt_logprobs, self._model, self._body),
                self._ids(answer.token_ids),
                self._prompt_ids(i),
            )
            for i, answer in enumerate(answers)
        ]

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Send each piece as it comes, then the end of the stream. Echoed prompts come first, or, where their
        log-probabilities are requested, once those are computed."""
        so_far = partial(usage_so_far, self._body, generation)
        if self._body.echo and self._body.logprobs is None:
            for i in range(len(self._offsets)):
                await chunks.send(self._completion([CompletionChoice(i, self._echo(i), None, None)], so_far()))
        started = set[int]()
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                if delta.prompt_progress is not None:
                    about = self._completion([CompletionChoice(i, "", None, None)], so_far())
                    progress = prompt_progress_field(delta.prompt_progress)
                    await chunks.send(msgspec.structs.replace(about, prompt_progress=progress))
                if delta.prompt_logprobs:
                    echoed = await self._model.offload(partial(self._echoed_logprobs, i, delta.prompt_logprobs))
                    await chunks.send(self._completion([CompletionChoice(i, self._echo(i), echoed, None)], so_far()))
                logprobs = self._logprobs(i, delta.logprobs)
                if delta.text or delta.logprobs or delta.finish or (self._body.return_token_ids and delta.token_ids):
                    stopped = generation.stop_reason(delta) if delta.finish else msgspec.UNSET
                    choice = CompletionChoice(
                        i,
                        delta.text,
                        logprobs,
                        delta.finish,
                        stopped,
                        token_ids=self._ids(delta.token_ids),
                        prompt_token_ids=msgspec.UNSET if i in started else self._prompt_ids(i),
                    )
                    started.add(i)
                    await chunks.send(self._completion([choice], so_far()))
        if self._include_usage:
            await chunks.send(self._completion([], usage_of(generation)))
        await chunks.send_raw(DONE)

    def _ids(self, token_ids: list[int]) -> TokenIds:
        return token_ids if self._body.return_token_ids else msgspec.UNSET

    def _prompt_ids(self, choice: int) -> TokenIds:
        return (
            self._ids(list(self._prompts[choice // self._body.n].ids)) if self._body.return_token_ids else msgspec.UNSET
        )

    def _echo(self, choice: int) -> str:
        return self._prompts[choice // self._body.n].text if self._body.echo else ""

    def _offsets_of(self, prompt: Prompt) -> TextOffsets:
        """Return the offsets of an answer's tokens in the text of its choice."""
        start = len(prompt.text) if self._body.echo else 0
        tokenizer = self._model.tokenizer
        return TextOffsets(tokenizer, prompt.answer_text(tokenizer, self._params), start=start)

    def _echoed_logprobs(self, choice: int, packed: bytes) -> CompletionLogprobs | None:
        top, prompt = self._body.logprobs, self._prompts[choice // self._body.n]
        if top is None or not (packed and self._body.echo):
            return None
        offsets = TextOffsets.in_text(prompt.text, self._model.tokenizer)
        return completion_logprobs(prompt.ids, unpack_logprobs(packed), offsets=offsets, top=top)

    def _logprobs(self, choice: int, records: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None or not records:
            return None
        token_ids = [record.token_id for record in records]
        return completion_logprobs(token_ids, records, offsets=self._offsets[choice], top=top)

    def _completion(self, choices: list[CompletionChoice], usage: UsageField) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
