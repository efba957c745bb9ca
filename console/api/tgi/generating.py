"""POST /generate, /generate_stream and /, where `stream` says which of the two is meant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from console.api.body import read
from console.api.context import ApiContext, new_id
from console.api.described import describes
from console.api.generation import Answer, Generation, respond
from console.api.prompts import Prompt
from console.api.sampling import SamplingFields, sampling_params
from console.api.served import ServedModel
from console.api.stream import ChunkStream, Framing
from console.api.tgi.body import TgiBody, TgiParameters
from console.api.tgi.shapes import (
    BestOfSequence,
    Details,
    Generated,
    PrefillToken,
    StreamDetails,
    StreamEvent,
    Token,
    TokenTexts,
    finish_of,
    prefill,
)
from engine.backends.base import unpack_logprobs
from engine.config import SamplingParams
from engine.stream import StreamDelta

_SSE = Framing("text/event-stream", lambda document: b"data:%b\n\n" % document, b":\n\n")
"""TGI puts no space after the colon."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One request, ready to be computed. echo: what stands before the answer."""

    asked: TgiParameters
    fields: SamplingFields
    model: ServedModel
    prompt: Prompt
    params: SamplingParams
    echo: str

    def texts(self) -> TokenTexts:
        """The tokens of one answer, before the first."""
        return TokenTexts(self.model.tokenizer, self.prompt.answer_text(self.model.tokenizer, self.params))


_EXAMPLE = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}}


class Generating:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.post("/", self._either),
            web.post("/generate", self._generate),
            web.post("/generate_stream", self._generate_stream),
        ]

    @describes("Continue a text, as TGI does", body=TgiBody, answer=Generated, example=_EXAMPLE)
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._whole(request, await read(request, TgiBody))

    @describes("Continue a text token by token, as TGI does", body=TgiBody, event=StreamEvent, example=_EXAMPLE)
    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, await read(request, TgiBody))

    @describes(
        "Continue a text, whole or token by token",
        body=TgiBody,
        answer=list[Generated],
        event=StreamEvent,
        example=_EXAMPLE,
    )
    async def _either(self, request: web.Request) -> web.StreamResponse:
        """Here, unlike elsewhere, the whole text is given where the client does not say."""
        body = await read(request, TgiBody)
        answer = self._stream if body.stream else self._whole
        return await answer(request, body, compatible=True)

    async def _whole(self, request: web.Request, body: TgiBody, *, compatible: bool = False) -> web.Response:
        began = time.monotonic()
        call = await self._read(request, body, full_text=compatible, stream=False)
        async with self._generation(request, call) as generation:
            answers = await generation.answers()
            shape = partial(_generated, call, answers)
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
        """What the body asks for. full_text: whether the prompt is given too where the body does not say."""
        asked = body.asked()
        asked.check(stream=stream)
        fields = asked.sampling(body.model)
        model = await self._context.served(request, fields)
        told = stream or asked.tells or asked.best_of > 1
        params = sampling_params(
            fields,
            model,
            max_tokens=asked.max_new_tokens,
            logprobs=asked.top_n_tokens if told else None,
            prompt_logprobs=0 if asked.decoder_input_details else None,
        )
        if asked.grammar is not None:
            most = self._context.settings.max_schema_bytes
            params = msgspec.structs.replace(params, grammar=await asyncio.to_thread(asked.grammar.grammar, most))
        prompt = await body.prompt(model, asked.truncate)
        full = full_text if asked.return_full_text is None else asked.return_full_text
        if full:
            self._context.check_echo([prompt], asked.best_of)
        return _Call(asked, fields, model, prompt, params, body.inputs if full else "")

    def _generation(self, request: web.Request, call: _Call) -> AbstractAsyncContextManager[Generation]:
        return self._context.generate(request, new_id("tgi"), call.fields, call.model, [call.prompt], call.params)


class _Events:
    """A stream's events: one for each token, as it comes."""

    def __init__(self, call: _Call, generation: Generation) -> None:
        self._call = call
        self._generation = generation
        self._texts = call.texts()
        self._shown = [call.echo]
        self._index = 0

    def of(self, delta: StreamDelta) -> Iterator[StreamEvent]:
        """Those of one delta; the last ends the stream, and where no token came with it, it has an empty one."""
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
            seed=self._call.asked.seed,
            input_length=self._generation.tokens.prompt,
        )
        return msgspec.structs.replace(
            event,
            generated_text="".join(self._shown),
            details=details if self._call.asked.details else None,
        )


def _generated(call: _Call, answers: list[Answer]) -> Generated:
    """The answer, or the best of several: that whose tokens are likeliest on average."""
    best = max(answers, key=lambda answer: answer.likelihood)
    generated = Generated(generated_text=call.echo + best.text)
    if not call.asked.tells:
        return generated
    others = [_sequence(call, answer) for answer in answers if answer is not best]
    told = _sequence(call, best)
    details = Details(
        finish_reason=told.finish_reason,
        generated_tokens=told.generated_tokens,
        seed=told.seed,
        prefill=told.prefill,
        tokens=told.tokens,
        top_tokens=told.top_tokens,
        best_of_sequences=others or msgspec.UNSET,
    )
    return msgspec.structs.replace(generated, details=details)


def _sequence(call: _Call, answer: Answer) -> BestOfSequence:
    texts, records = call.texts(), answer.logprobs
    places = [texts.next(record) for record in records]
    last_id = records[-1].token_id if records else None
    return BestOfSequence(
        generated_text=call.echo + answer.text,
        finish_reason=finish_of(answer.finish, last_id, call.model.tokenizer),
        generated_tokens=len(records),
        seed=call.asked.seed,
        prefill=_prefill(call, answer),
        tokens=[token for token, _ in places],
        top_tokens=[likeliest for _, likeliest in places] if call.asked.top_n_tokens else msgspec.UNSET,
    )


def _prefill(call: _Call, answer: Answer) -> list[PrefillToken]:
    """The prompt's tokens, where they were asked for."""
    if not call.asked.decoder_input_details:
        return []
    return prefill(call.prompt.ids, unpack_logprobs(answer.prompt_logprobs), call.model.tokenizer)
