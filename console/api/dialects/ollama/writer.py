"""Writes an answer of Ollama's dialect, line by line or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web
from msgspec import UNSET
from msgspec.structs import asdict

from console.api.dialects.ollama.answers import AnswerPart, Stopwatch, ToolCalled, ToolFunction, done_reason, now
from console.api.http.errors import json_response
from console.api.requests.generation import Generation
from console.api.requests.logprobs import ChatLogprob, chat_logprobs
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import JSON_LINES, ChunkStream
from console.api.settings import ApiSettings
from console.api.tools import CallArguments, CallBegan, CallCut, CallEnded, CallReader, Said, arguments_of
from engine.engine import StreamDelta
from engine.text.tokenizer import IncrementalDetokenizer

# Tool calls as Ollama has them: whole, also in a stream.


class CallCollector:
    """Collects the tool calls of an answer under way. reader: parses them; None without tools."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._began: CallBegan | None = None
        self._arguments: list[str] = []

    def read(self, text: str, *, ended: bool) -> tuple[str, list[ToolCalled]]:
        """Return the prose of more of the answer, and the calls that it completes or ends within; a call that turns
        into prose again is dropped."""
        if self._reader is None:
            return text, []
        prose: list[str] = []
        calls: list[ToolCalled] = []
        for piece in (*self._reader.feed(text), *(self._reader.finish() if ended else ())):
            match piece:
                case Said(text=words):
                    prose.append(words)
                case CallBegan():
                    self._began, self._arguments = piece, []
                case CallArguments(text=more):
                    self._arguments.append(more)
                case CallEnded(index=index) | CallCut(index=index) if self._began is not None:
                    arguments = arguments_of("".join(self._arguments), cut=isinstance(piece, CallCut))
                    calls.append(ToolCalled(self._began.id, ToolFunction(index, self._began.name, arguments)))
                case _:
                    self._began = None
        return "".join(prose), calls


class AnswerShape(Protocol):
    """Makes an answer, or a piece of one, in the shape of its endpoint. ids: of the answer's tokens, at its end."""

    def __call__(self, text: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: Any) -> AnswerPart:
        """fields: those of AnswerPart."""


class AnswerWriter:
    """Writes one answer. logprobs: the detokenizer for log-probabilities; None where they were not requested.

    reader: parses tool calls; None without tools.
    """

    def __init__(
        self,
        model: ServedModel,
        watch: Stopwatch,
        shape: AnswerShape,
        *,
        logprobs: IncrementalDetokenizer | None = None,
        reader: CallReader | None = None,
    ) -> None:
        self._model = model
        self._watch = watch
        self._shape = shape
        self._text = logprobs
        self._calls = CallCollector(reader)
        self._ids: list[int] = []

    async def answer(
        self, request: web.Request, settings: ApiSettings, generation: Generation, stream: bool
    ) -> web.StreamResponse:
        """Return the response, sent line by line where it is a stream."""
        if not stream:
            return json_response(await self._whole(generation))
        async with ChunkStream(request, settings, JSON_LINES) as chunks:
            async for delta in self._deltas(generation):
                prose, calls = self._calls.read(delta.text, ended=delta.finish is not None)
                logprobs = self._logprobs(delta)
                if prose or calls or logprobs:
                    await chunks.send(self._part(prose, calls, None, done=False, logprobs=logprobs or UNSET))
                if delta.finish is not None:
                    await chunks.send(self._last("", [], [], generation, delta))
        return chunks.response

    def loaded(self) -> web.Response:
        """Return the answer to a request that only loads the model."""
        return json_response(self._part("", [], None, done=True, done_reason="load", **asdict(self._watch.loaded())))

    async def _whole(self, generation: Generation) -> AnswerPart:
        deltas = [delta async for delta in self._deltas(generation)]
        prose, calls = self._calls.read("".join(delta.text for delta in deltas), ended=True)
        logprobs = [entry for delta in deltas for entry in self._logprobs(delta)]
        return self._last(prose, calls, logprobs, generation, deltas[-1])

    async def _deltas(self, generation: Generation) -> AsyncGenerator[StreamDelta, None]:
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._ids.extend(delta.token_ids)
                yield delta

    def _last(
        self,
        text: str,
        calls: list[ToolCalled],
        logprobs: list[ChatLogprob],
        generation: Generation,
        delta: StreamDelta,
    ) -> AnswerPart:
        [row] = generation.work.rows
        figures = asdict(self._watch.figures(row))
        reason = done_reason(delta.finish)
        return self._part(text, calls, self._ids, done=True, done_reason=reason, logprobs=logprobs or UNSET, **figures)

    def _part(self, text: str, calls: list[ToolCalled], ids: list[int] | None, **fields: Any) -> AnswerPart:
        return self._shape(text, calls, ids, model=self._model.name, created_at=now(), **fields)

    def _logprobs(self, delta: StreamDelta) -> list[ChatLogprob]:
        return chat_logprobs(delta.logprobs, self._text).content if self._text is not None else []
