"""POST /completion and /completions: answers at once or as a stream of events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from console.api.context import MAX_REPEATED, ApiContext, apply_limits, new_id
from console.api.dialects.llamacpp.body import RANDOM_SEED, LlamaBody, count_prompts, llama_prompts
from console.api.requests.body import read
from console.api.requests.generation import (
    GeneratedAnswer,
    Generation,
    StoppedBy,
    WhyField,
    id_of_choice,
    params_of_choice,
    respond,
)
from console.api.requests.logprobs import LOWEST
from console.api.requests.progress import PromptProgressField, prompt_progress_field
from console.api.requests.prompts import Prompt
from console.api.requests.schemas import describes
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import SSE, ChunkStream
from engine.backends.base import FinishReason, TokenLogprob
from engine.config import SamplingParams
from engine.engine import StreamDelta
from engine.errors import InvalidRequest
from engine.snapshot import RequestRow
from engine.text.tokenizer import IncrementalDetokenizer

# Answers.

StopType = Literal["none", "eos", "limit", "word"]

_ANY_SLOT = -1


class TopToken(msgspec.Struct, frozen=True):
    """An alternative to a token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenProbabilities(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest at its place. bytes: its part of the text, maybe of a character."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopToken]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of prompt and answer. cache_n: prompt tokens found in the prefix cache, which prompt_n does not count.

    ..._per_token_ms, ..._per_second: null without any token or time.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a piece of it: the last or only one has all fields, or those of response_fields.

    index: its number among several.  tokens: ids, in a stream or where requested.  id_slot: always -1.
    tokens_evaluated: of the prompt.  tokens_cached: of those, found in the prefix cache.
    generation_settings: the settings used, in llama.cpp's words.  truncated: the context ended the answer.
    stop_type: "eos", "limit", or "word" for stopping_word.  timings, completion_probabilities: where requested.
    prompt_progress: where requested, before the first token.  why: with the end, where requested.
    """

    index: int = 0
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    id_slot: int = _ANY_SLOT
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    model: str | msgspec.UnsetType = msgspec.UNSET
    generation_settings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    has_new_line: bool | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: StopType | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[TokenProbabilities] | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: PromptProgressField | msgspec.UnsetType = msgspec.UNSET
    why: WhyField = msgspec.UNSET


def timings_of(row: RequestRow) -> Timings:
    """Return the times of an answer so far. row: of the request table."""
    prompt = row.prompt_tokens - row.cached_tokens
    prompt_ms = 0.0 if row.ttft_s is None else 1000 * max(0.0, row.ttft_s - row.queued_s)
    predicted_ms = 1000 * (row.itl_s or 0.0) * max(0, row.output_tokens - 1)
    return Timings(
        cache_n=row.cached_tokens,
        prompt_n=prompt,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=_ratio(prompt_ms, prompt),
        prompt_per_second=_ratio(1000 * prompt, prompt_ms),
        predicted_n=row.output_tokens,
        predicted_ms=round(predicted_ms, 3),
        predicted_per_token_ms=_ratio(predicted_ms, row.output_tokens),
        predicted_per_second=_ratio(1000 * row.output_tokens, predicted_ms),
    )


def _ratio(value: float, of: float) -> float | None:
    return round(value / of, 3) if of and value else None


def settings_of(body: LlamaBody, params: SamplingParams) -> dict[str, Any]:
    """Return the settings of an answer in llama.cpp's words. params: as they are used."""
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature if body.temperature is None else body.temperature,
        "dynatemp_range": (params.max_temp - params.min_temp) / 2,
        "dynatemp_exponent": params.temp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": body.repetition_range,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": body.dry_range,
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "stop": list(params.stop),
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": params.ignore_eos,
        "stream": body.stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "n_probs": body.n_probs,
        "min_keep": 0,
        "grammar": body.grammar_string or "",
        "samplers": body.sampler_names or list(DEFAULT_SAMPLERS),
        "timings_per_token": body.timings_per_token,
        "post_sampling_probs": False,
    }


_USUAL_LENGTH = 2048
"""Bytes of settings that any number of answers may repeat."""


def _check_settings(settings: dict[str, Any], answers: int) -> None:
    """Raise InvalidRequest where answers that each repeat the settings would be too long together."""
    length = len(msgspec.json.encode(settings)) if answers > 1 else 0
    repeated = answers * length
    if length > _USUAL_LENGTH and repeated > MAX_REPEATED:
        raise InvalidRequest(
            f"{answers} answers would repeat {repeated} bytes of settings; the limit is {MAX_REPEATED}: send fewer "
            "prompts, or a shorter logit_bias or grammar",
            param="n",
        )


DEFAULT_SAMPLERS = ("penalties", "dry", "top_k", "top_p", "min_p", "typ_p", "xtc", "temperature")


def selected(answer: Completed, fields: Sequence[str]) -> Completed | dict[str, Any]:
    """Return the fields of an answer that a client wants, all where it names none; "a/b" is field b of a, under that
    name."""
    if not fields:
        return answer
    whole = msgspec.to_builtins(answer)
    found = {field: _find(whole, field.split("/")) for field in fields}
    return {name: value[0] for name, value in found.items() if value}


def _find(within: Mapping[str, Any], path: Sequence[str]) -> list[Any]:
    """Return the value at a path, in a list; an empty list where there is none."""
    first, *rest = path
    if first not in within:
        return []
    value = within[first]
    return [value] if not rest else _find(value, rest) if isinstance(value, dict) else []


_EXAMPLE = {"prompt": "Once upon a time", "n_predict": 16}


class CompletionEndpoints:
    """POST /completion and /completions."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.post("/completion", self._post), web.post("/completions", self._post)]

    @describes(
        "Complete a text (llama.cpp)",
        body=LlamaBody,
        answer=Completed | list[Completed],
        event=Completed,
        example=_EXAMPLE,
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, LlamaBody)
        model = await self._context.served_model(request, body, SSE if body.stream else None)
        self._context.check_choices(count_prompts(body.prompt), body.n)
        params = apply_limits(await body.params(model), self._context.settings)
        prompts = await llama_prompts(body.prompt, model)
        self._context.check_echo(prompts, body.n)
        _check_settings(settings_of(body, params), len(prompts) * body.n)
        call = _Call(self._context, body, model, prompts, params)
        async with self._context.generate(request, call.id, body, model, prompts, params) as generation:
            if not body.stream:
                return await call.answer(generation)
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


class _Call:
    """One request and its answers."""

    def __init__(
        self,
        context: ApiContext,
        body: LlamaBody,
        model: ServedModel,
        prompts: list[Prompt],
        params: SamplingParams,
    ) -> None:
        self.id = new_id("llama")
        self._context = context
        self._body = body
        self._model = model
        self._prompts = prompts
        self._params = params
        self._size = len(prompts) * body.n
        self._texts = [prompt.answer_text(model.tokenizer, params) for prompt in prompts for _ in range(body.n)]

    async def answer(self, generation: Generation) -> web.Response:
        """Return all answers in one response: an array of several."""
        answers = await generation.answers()
        return await respond(answers, partial(self._whole, generation, answers), self._model)

    def _whole(self, generation: Generation, answers: Sequence[GeneratedAnswer]) -> object:
        rows = _rows_of(generation)
        found = [self._completed(i, answer, rows[self._row_id(i)], generation) for i, answer in enumerate(answers)]
        return found if len(found) > 1 else found[0]

    def _completed(
        self, i: int, answer: GeneratedAnswer, row: RequestRow, generation: Generation
    ) -> Completed | dict[str, Any]:
        probabilities = self._probabilities(i, answer.logprobs)
        ending = self._ending(i, answer.finish, answer.stop_reason, "\n" in answer.text, row, generation)
        whole = msgspec.structs.replace(
            ending,
            content=answer.text,
            tokens=answer.token_ids if self._body.return_tokens else [],
            completion_probabilities=probabilities or msgspec.UNSET,
        )
        return selected(whole, self._body.response_fields)

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Send each piece as it comes, and a last one without text for each answer."""
        has_new_line = defaultdict[int, bool](bool)
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                if delta.prompt_progress is not None:
                    about = self._piece(i, StreamDelta(), generation)
                    progress = prompt_progress_field(delta.prompt_progress)
                    await chunks.send(msgspec.structs.replace(about, prompt_progress=progress))
                has_new_line[i] |= "\n" in delta.text
                if delta.text or delta.token_ids:
                    await chunks.send(self._piece(i, delta, generation))
                if delta.finish is not None:
                    stopped, row = generation.stop_reason(delta), _rows_of(generation)[self._row_id(i)]
                    end = self._ending(i, delta.finish, stopped, has_new_line[i], row, generation)
                    await chunks.send(selected(end, self._body.response_fields))

    def _piece(self, i: int, delta: StreamDelta, generation: Generation) -> Completed:
        """Return the event of a delta."""
        row_id, row = self._row_id(i), None
        if self._body.timings_per_token:
            row = self._context.engine.request_row(row_id) or _rows_of(generation).get(row_id)
        return Completed(
            index=i,
            content=delta.text,
            tokens=delta.token_ids,
            tokens_predicted=delta.output_tokens,
            tokens_evaluated=len(self._prompts[i // self._body.n].ids),
            timings=msgspec.UNSET if row is None else timings_of(row),
            completion_probabilities=self._probabilities(i, delta.logprobs) or msgspec.UNSET,
        )

    def _ending(
        self,
        i: int,
        finish: FinishReason | None,
        stopped: StoppedBy,
        has_new_line: bool,
        row: RequestRow,
        generation: Generation,
    ) -> Completed:
        """Return the last event of an answer. row: of the request table."""
        prompt = self._prompts[i // self._body.n]
        word = stopped if isinstance(stopped, str) else ""
        is_full = row.prompt_tokens + row.output_tokens >= self._model.loaded.max_model_len
        return Completed(
            index=i,
            stop=True,
            model=self._model.name,
            tokens_predicted=row.output_tokens,
            tokens_evaluated=row.prompt_tokens,
            generation_settings=settings_of(self._body, params_of_choice(self._params, i % self._body.n)),
            prompt=prompt.text,
            has_new_line=has_new_line,
            truncated=finish == "length" and is_full,
            stop_type=("word" if word else "eos") if finish == "stop" else "limit",
            stopping_word=word,
            tokens_cached=row.cached_tokens,
            timings=timings_of(row),
            why=generation.why,
        )

    def _probabilities(self, i: int, records: Sequence[TokenLogprob]) -> list[TokenProbabilities]:
        return list(_probabilities(records, self._texts[i])) if self._body.n_probs else []

    def _row_id(self, choice: int) -> str:
        return self.id if self._size == 1 else id_of_choice(self.id, choice)


def _rows_of(generation: Generation) -> dict[str, RequestRow]:
    """Return the rows of the answers that have ended, by id."""
    return {row.id: row for row in generation.work.rows}


def _probabilities(records: Sequence[TokenLogprob], text: IncrementalDetokenizer) -> Iterator[TokenProbabilities]:
    """Yield the probabilities of tokens. text: before them."""
    for record in records:
        raw = text.bytes_of(record.token_id)
        top = [
            TopToken(token_id, other.decode(errors="replace"), list(other), max(logprob, LOWEST))
            for token_id, logprob in record.top
            for other in [text.bytes_of(token_id)]
        ]
        text.push(record.token_id)
        logprob = max(record.logprob, LOWEST)
        yield TokenProbabilities(record.token_id, raw.decode(errors="replace"), list(raw), logprob, top)
