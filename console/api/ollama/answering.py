"""One answer of Ollama's dialect on its way: line by line, or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web
from msgspec import UNSET
from msgspec.structs import asdict

from console.api.errors import json_response
from console.api.generation import Generation
from console.api.logprobs import ChatLogprob, chat_logprobs
from console.api.ollama.answers import Part, Stopwatch, ToolCalled, done_reason, now
from console.api.served import ServedModel
from console.api.settings import ApiSettings
from console.api.stream import JSON_LINES, ChunkStream
from engine.engine import StreamDelta


class Shape(Protocol):
    """Makes an answer, or a piece of one, in the shape of its endpoint. ids: of the answer's tokens, with its end."""

    def __call__(self, text: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: object) -> Part:
        """fields: as Part has them."""


class Answering:
    """Makes an answer of what the engine tells. logprobs: whether those were asked for."""

    def __init__(self, model: ServedModel, watch: Stopwatch, shape: Shape, *, logprobs: bool = False) -> None:
        self._model = model
        self._watch = watch
        self._shape = shape
        self._wants_logprobs = logprobs
        self._ids: list[int] = []

    async def answer(
        self, request: web.Request, settings: ApiSettings, generation: Generation, stream: bool
    ) -> web.StreamResponse:
        """The response, sent line by line where it is a stream."""
        if not stream:
            return json_response(await self._whole(generation))
        async with ChunkStream(request, settings, JSON_LINES) as chunks, aclosing(self._parts(generation)) as parts:
            async for part in parts:
                await chunks.send(part)
        return chunks.response

    def loaded(self) -> web.Response:
        """The answer to a request that only wanted the model to be there."""
        return json_response(self._part("", [], None, done=True, done_reason="load", **asdict(self._watch.loaded())))

    async def _whole(self, generation: Generation) -> Part:
        text: list[str] = []
        logprobs: list[ChatLogprob] = []
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._ids.extend(delta.token_ids)
                text.append(delta.text)
                logprobs.extend(self._logprobs(delta))
                if delta.finish is not None:
                    return self._last("".join(text), [], logprobs, generation, delta)
        raise AssertionError("an answer ends with a delta that says why")

    async def _parts(self, generation: Generation) -> AsyncGenerator[Part, None]:
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._ids.extend(delta.token_ids)
                logprobs = self._logprobs(delta)
                if delta.text or logprobs:
                    yield self._part(delta.text, [], None, done=False, logprobs=logprobs or UNSET)
                if delta.finish is not None:
                    yield self._last("", [], [], generation, delta)

    def _last(
        self,
        text: str,
        calls: list[ToolCalled],
        logprobs: list[ChatLogprob],
        generation: Generation,
        delta: StreamDelta,
    ) -> Part:
        [row] = generation.work.rows
        figures = asdict(self._watch.figures(row))
        reason = done_reason(delta.finish)
        return self._part(text, calls, self._ids, done=True, done_reason=reason, logprobs=logprobs or UNSET, **figures)

    def _part(self, text: str, calls: list[ToolCalled], ids: list[int] | None, **fields: object) -> Part:
        return self._shape(text, calls, ids, model=self._model.name, created_at=now(), **fields)

    def _logprobs(self, delta: StreamDelta) -> list[ChatLogprob]:
        return chat_logprobs(delta.logprobs, self._model.tokenizer).content if self._wants_logprobs else []
