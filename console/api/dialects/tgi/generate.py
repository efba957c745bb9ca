"""POST /generate, /generate_stream, and /, where `stream` chooses between the two; GET /info and POST /tokenize."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext, new_id
from console.api.dialects.tgi.body import TgiBody, TgiParameters
from console.api.http.errors import json_response
from console.api.http.request_body import offload
from console.api.requests.body import read
from console.api.requests.generation import GeneratedAnswer, Generation, WhyField, respond
from console.api.requests.logprobs import LOWEST
from console.api.requests.prompts import Prompt
from console.api.requests.sampling import MAX_N, SamplingFields, sampling_params
from console.api.requests.schemas import describes
from console.api.requests.served_model import MANY_TOKENS, ServedModel
from console.api.requests.stream import ChunkStream, Framing
from console.api.version import product_version
from engine.backends.base import FinishReason, TokenLogprob, unpack_logprobs
from engine.config import MAX_STOP_STRINGS, SamplingParams
from engine.requests.stream import StreamDelta
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer, TokenSpan

# Answers.

TgiFinish = Literal["length", "eos_token", "stop_sequence"]


class Token(msgspec.Struct, frozen=True):
    """A token of an answer. text: its part of the text; the token that completes a character has all of it.

    special: True for a control token.
    """

    id: int
    text: str
    logprob: float
    special: bool


class PrefillToken(msgspec.Struct, frozen=True):
    """A token of the prompt. logprob: null for the first."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of several, not the best. seed: null where the client set none."""

    generated_text: str
    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Details of an answer. top_tokens, best_of_sequences: where requested."""

    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[Token]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. details, why: where requested."""

    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET
    why: WhyField = msgspec.UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details at the end of a stream. input_length: tokens of the prompt."""

    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream. index: from 1.  generated_text, details, why: in the last, the others where requested."""

    index: int
    token: Token
    top_tokens: list[Token] | msgspec.UnsetType = msgspec.UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None
    why: WhyField = msgspec.UNSET


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Model, limits and version. max_input_length: older TGI's name of max_input_tokens."""

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
    """A token of a text. start, stop: characters."""

    id: int
    text: str
    start: int
    stop: int


class TokenTexts:
    """The tokens of one text, in their order, each with its part of the text.

    Control tokens that the text hides have their names.  text: the text's detokenizer, before its first token.
    """

    def __init__(self, tokenizer: Tokenizer, text: IncrementalDetokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = text

    def next(self, record: TokenLogprob) -> tuple[Token, list[Token]]:
        """Return the next token, and its alternatives, the likeliest first."""
        likeliest = [
            self._token(id_, self._text.bytes_of(id_).decode(errors="replace"), logprob) for id_, logprob in record.top
        ]
        return self._token(record.token_id, self.text_of(record.token_id), record.logprob), likeliest

    def text_of(self, token_id: int) -> str:
        """Return the next token's part of the text."""
        name = self._text.bytes_of(token_id).decode() if token_id in self._tokenizer.special_ids else ""
        return self._text.push(token_id) or name

    def _token(self, token_id: int, text: str, logprob: float) -> Token:
        return Token(token_id, text, max(logprob, LOWEST), token_id in self._tokenizer.special_ids)


def finish_of(finish: FinishReason | None, last_token: int | None, tokenizer: Tokenizer) -> TgiFinish:
    """Return why an answer ended, in TGI's words: "length" also for one that ran out of time."""
    if finish != "stop":
        return "length"
    return "eos_token" if last_token in tokenizer.eos_token_ids else "stop_sequence"


def prefill(ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> list[PrefillToken]:
    """Return a prompt's tokens. logprobs: one for each."""
    texts = TokenTexts(tokenizer, IncrementalDetokenizer(tokenizer))
    return [
        PrefillToken(id_, texts.text_of(id_), None if record is None else max(record.logprob, LOWEST))
        for id_, record in zip(ids, logprobs, strict=True)
    ]


_SSE = Framing("text/event-stream", lambda document: b"data:%b\n\n" % document, b":\n\n")
"""TGI puts no space after the colon."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One request, ready to be computed. echo: text before the answer."""

    parameters: TgiParameters
    fields: SamplingFields
    model: ServedModel
    prompt: Prompt
    params: SamplingParams
    echo: str

    def texts(self) -> TokenTexts:
        """Return the tokens of one answer, before the first."""
        return TokenTexts(self.model.tokenizer, self.prompt.answer_text(self.model.tokenizer, self.params))


_EXAMPLE = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}}


class GenerateEndpoints:
    """POST /generate, /generate_stream and /."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.post("/", self._either),
            web.post("/generate", self._generate),
            web.post("/generate_stream", self._generate_stream),
        ]

    @describes("Complete a text (TGI)", body=TgiBody, answer=Generated, example=_EXAMPLE)
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, await read(request, TgiBody))

    @describes("Complete a text as a stream (TGI)", body=TgiBody, event=StreamEvent, example=_EXAMPLE)
    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, await read(request, TgiBody))

    @describes(
        "Complete a text, whole or as a stream",
        body=TgiBody,
        answer=list[Generated],
        event=StreamEvent,
        example=_EXAMPLE,
    )
    async def _either(self, request: web.Request) -> web.StreamResponse:
        """Answer as `stream` says; here, unlike at the other two, the text includes the prompt by default."""
        body = await read(request, TgiBody)
        answer = self._stream if body.stream else self._complete
        return await answer(request, body, compatible=True)

    async def _complete(self, request: web.Request, body: TgiBody, *, compatible: bool = False) -> web.Response:
        began = time.monotonic()
        call = await self._read(request, body, full_text=compatible, stream=False)
        async with self._generation(request, call) as generation:
            answers = await generation.answers()
            shape = partial(_best_answer, call, answers, generation.why)
            response = await respond(answers, lambda: [shape()] if compatible else shape(), call.model)
            response.headers["x-prompt-tokens"] = str(generation.tokens.prompt)
            response.headers["x-generated-tokens"] = str(generation.tokens.output)
        response.headers["x-compute-characters"] = str(len(body.inputs))
        response.headers["x-total-time"] = str(round((time.monotonic() - began) * 1000))
        return response

    async def _stream(self, request: web.Request, body: TgiBody, *, compatible: bool = False) -> web.StreamResponse:
        call = await self._read(request, body, full_text=compatible, stream=True)
        async with self._generation(request, call) as generation:
            async with ChunkStream(request, self._context.settings, _SSE) as chunks:
                events = _Events(call, generation)
                async with aclosing(generation.deltas()) as deltas:
                    async for _, delta in deltas:
                        for event in events.of(delta):
                            await chunks.send(event)
            return chunks.response

    async def _read(self, request: web.Request, body: TgiBody, *, full_text: bool, stream: bool) -> _Call:
        """Read the request. full_text: default of return_full_text."""
        parameters = body.read_parameters()
        parameters.check(stream=stream)
        fields = parameters.sampling(body.model)
        model = await self._context.served_model(request, fields, _SSE if stream else None)
        wants_logprobs = stream or parameters.has_details or parameters.best_of > 1
        params = sampling_params(
            fields,
            model,
            max_tokens=parameters.max_new_tokens,
            logprobs=parameters.top_n_tokens if wants_logprobs else None,
            prompt_logprobs=0 if parameters.decoder_input_details else None,
        )
        if parameters.grammar is not None:
            max_bytes = self._context.settings.max_schema_bytes
            grammar = await asyncio.to_thread(parameters.grammar.grammar, max_bytes)
            params = msgspec.structs.replace(params, grammar=grammar)
        prompt = await body.prompt(model, parameters.truncate)
        full = full_text if parameters.return_full_text is None else parameters.return_full_text
        if full:
            self._context.check_echo([prompt], parameters.best_of)
        return _Call(parameters, fields, model, prompt, params, body.inputs if full else "")

    def _generation(self, request: web.Request, call: _Call) -> AbstractAsyncContextManager[Generation]:
        return self._context.generate(request, new_id("tgi"), call.fields, call.model, [call.prompt], call.params)


class _Events:
    """The events of a stream, one for each token."""

    def __init__(self, call: _Call, generation: Generation) -> None:
        self._call = call
        self._generation = generation
        self._texts = call.texts()
        self._shown = [call.echo]
        self._index = 0

    def of(self, delta: StreamDelta) -> Iterator[StreamEvent]:
        """Return the events of one delta. The last ends the stream, with an empty token where the delta has none."""
        self._shown.append(delta.text)
        events = [self._event(*self._texts.next(each)) for each in delta.logprobs]
        if delta.finish is not None:
            last = events.pop() if events else self._event(Token(0, "", 0.0, special=True), [])
            events.append(self._end(last, delta))
        return iter(events)

    def _event(self, token: Token, likeliest: list[Token]) -> StreamEvent:
        self._index += 1
        return StreamEvent(index=self._index, token=token, top_tokens=likeliest or msgspec.UNSET)

    def _end(self, event: StreamEvent, delta: StreamDelta) -> StreamEvent:
        last_id = delta.token_ids[-1] if delta.token_ids else None
        details = StreamDetails(
            finish_reason=finish_of(delta.finish, last_id, self._call.model.tokenizer),
            generated_tokens=delta.output_tokens,
            seed=self._call.parameters.seed,
            input_length=self._generation.tokens.prompt,
        )
        return msgspec.structs.replace(
            event,
            generated_text="".join(self._shown),
            details=details if self._call.parameters.details else None,
            why=self._generation.why,
        )


def _best_answer(call: _Call, answers: list[GeneratedAnswer], why: WhyField) -> Generated:
    """Return the answer, or the best of several: the one whose tokens are likeliest on average."""
    best = max(answers, key=lambda answer: answer.likelihood)
    generated = Generated(generated_text=call.echo + best.text, why=why)
    if not call.parameters.has_details:
        return generated
    others = [_sequence(call, answer) for answer in answers if answer is not best]
    sequence = _sequence(call, best)
    details = Details(
        finish_reason=sequence.finish_reason,
        generated_tokens=sequence.generated_tokens,
        seed=sequence.seed,
        prefill=sequence.prefill,
        tokens=sequence.tokens,
        top_tokens=sequence.top_tokens,
        best_of_sequences=others or msgspec.UNSET,
    )
    return msgspec.structs.replace(generated, details=details)


def _sequence(call: _Call, answer: GeneratedAnswer) -> BestOfSequence:
    texts, records = call.texts(), answer.logprobs
    places = [texts.next(record) for record in records]
    last_id = records[-1].token_id if records else None
    return BestOfSequence(
        generated_text=call.echo + answer.text,
        finish_reason=finish_of(answer.finish, last_id, call.model.tokenizer),
        generated_tokens=len(records),
        seed=call.parameters.seed,
        prefill=_prefill(call, answer),
        tokens=[token for token, _ in places],
        top_tokens=[likeliest for _, likeliest in places] if call.parameters.top_n_tokens else msgspec.UNSET,
    )


def _prefill(call: _Call, answer: GeneratedAnswer) -> list[PrefillToken]:
    """Return the prompt's tokens, where requested."""
    if not call.parameters.decoder_input_details:
        return []
    return prefill(call.prompt.ids, unpack_logprobs(answer.prompt_logprobs), call.model.tokenizer)


# The model and its limits, and the tokens of a text.


class InfoEndpoints:
    """GET /info and POST /tokenize."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.get("/info", self._info), web.post("/tokenize", self._tokenize)]

    @describes("Model and limits (TGI)", answer=Info)
    async def _info(self, request: web.Request) -> web.Response:
        status, config = self._context.engine.status, self._context.engine.config
        loaded = status.model or (await self._context.served_model(request, SamplingFields.from_document({}))).loaded
        return json_response(
            Info(
                model_id="" if status.spec is None else status.spec.name,
                model_dtype=f"torch.{loaded.dtype}",
                model_device_type=loaded.devices[0].partition(":")[0] if loaded.devices else "cpu",
                max_concurrent_requests=config.num_workers * config.max_prompts + config.max_queue,
                max_best_of=MAX_N,
                max_stop_sequences=min(MAX_STOP_STRINGS, self._context.settings.max_stops),
                max_input_tokens=loaded.max_model_len - 1,
                max_input_length=loaded.max_model_len - 1,
                max_total_tokens=loaded.max_model_len,
                version=product_version(),
            )
        )

    @describes(
        "Tokenize text, with offsets (TGI)",
        body=TgiBody,
        answer=list[SimpleToken],
        example={"inputs": "Once upon a time"},
    )
    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read(request, TgiBody)
        truncate = body.read_parameters().truncate
        model = await self._context.served_model(request, SamplingFields.from_document({"model": body.model}))
        spans = await model.spans(body.inputs)
        shown = spans if truncate is None else spans[-truncate:]
        tokens = partial(_tokens, body.inputs, shown)
        return await offload(request, tokens) if len(shown) > MANY_TOKENS else tokens()


def _tokens(text: str, spans: Sequence[TokenSpan]) -> web.Response:
    return json_response(
        [SimpleToken(span.token_id, text[span.start : span.stop], span.start, span.stop) for span in spans]
    )
