"""Answers of Ollama's endpoints, written line by line or whole, and their durations, all measured, in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from console.api.http.errors import json_response
from console.api.http.traffic import call_of
from console.api.requests.generation import Generation, WhyField
from console.api.requests.logprobs import ChatLogprob, chat_logprobs
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import JSON_LINES, ChunkStream
from console.api.settings import ApiSettings
from console.api.tools import (
    CallArguments,
    CallEnd,
    CallReader,
    CallStart,
    CallTruncated,
    JsonObject,
    TextPiece,
    arguments_of,
)
from engine.backends.base import FinishReason
from engine.engine import StreamDelta
from engine.snapshot import RequestRow
from engine.text.tokenizer import IncrementalDetokenizer

T = TypeVar("T")

DoneReason = Literal["stop", "length", "timeout", "load", "unload"]

_NS = 10**9


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Durations and token counts, with the end of an answer. load_duration: waiting for the model to be loaded.

    prompt_eval_duration: from the start on a worker to the first token; the time in the queue is part of the total
    alone.  eval_duration: from the first token to the last.
    """

    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Stopwatch:
    """Measures one request, from its creation on. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._load_s = 0.0

    async def loading(self, model: Awaitable[T]) -> T:
        """Wait for a model, measuring that."""
        began = self._clock()
        try:
            return await model
        finally:
            self._load_s = self._clock() - began

    @property
    def total_ns(self) -> int:
        """Time since the request began."""
        return _ns(self._clock() - self._began)

    @property
    def load_ns(self) -> int:
        """Time spent waiting for the model."""
        return _ns(self._load_s)

    def load_figures(self) -> Figures:
        """Return the figures of a request that only loads the model."""
        return Figures(total_duration=self.total_ns, load_duration=self.load_ns)

    def figures(self, row: RequestRow) -> Figures:
        """Return the figures of a finished answer. row: of the request table."""
        return replace(
            self.load_figures(),
            prompt_eval_count=row.prompt_tokens,
            prompt_eval_duration=0 if row.ttft_s is None else _ns(row.ttft_s - row.queued_s),
            eval_count=row.output_tokens,
            eval_duration=_ns((row.itl_s or 0.0) * max(0, row.output_tokens - 1)),
        )


class ToolFunction(msgspec.Struct, frozen=True):
    """Name and arguments of a tool call. index: its place among the answer's calls."""

    index: int
    name: str
    arguments: JsonObject


class ToolCalled(msgspec.Struct, frozen=True):
    """A tool call."""

    id: str
    function: ToolFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answering message, or a piece of it. thinking: what the model thought before it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCalled] | UnsetType = UNSET


class AnswerPart(Figures, frozen=True, kw_only=True):
    """Fields of both endpoints' answers and of each line of a stream. why: with the end, where requested."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    why: WhyField = UNSET


class Generated(AnswerPart, frozen=True, kw_only=True):
    """An answer of /api/generate, or a piece. thinking: what the model thought before it.

    context: the conversation's tokens, for the next request.
    """

    response: str
    thinking: str | UnsetType = UNSET
    context: Sequence[int] | UnsetType = UNSET


class Chatted(AnswerPart, frozen=True, kw_only=True):
    """An answer of /api/chat, or a piece."""

    message: AnswerMessage


def done_reason(finish: FinishReason | None) -> DoneReason:
    """Return why an answer ended. "timeout", which Ollama does not have: the time for an answer was up."""
    return finish if finish in ("length", "timeout") else "stop"


def now() -> str:
    """Return the time now, for `created_at`."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(max(0.0, seconds) * _NS)


# Answers are written line by line or at once; tool calls are complete ones in a stream, too, as Ollama has them.


class CallCollector:
    """Collects the tool calls of an answer under way. reader: parses them; None without tools."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._began: CallStart | None = None
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
                case TextPiece(text=words):
                    prose.append(words)
                case CallStart():
                    self._began, self._arguments = piece, []
                case CallArguments(text=more):
                    self._arguments.append(more)
                case CallEnd(index=index) | CallTruncated(index=index) if self._began is not None:
                    arguments = arguments_of("".join(self._arguments), truncated=isinstance(piece, CallTruncated))
                    calls.append(ToolCalled(self._began.id, ToolFunction(index, self._began.name, arguments)))
                case _:
                    self._began = None
        return "".join(prose), calls


class AnswerShape(Protocol):
    """Makes an answer, or a piece of one, in the shape of its endpoint. ids: of the answer's tokens, at its end."""

    def __call__(
        self, text: str, thinking: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: Any
    ) -> AnswerPart:
        """fields: those of AnswerPart."""


def no_answer(model: str, watch: Stopwatch, shape: AnswerShape, *, unloads: bool) -> AnswerPart:
    """Return the answer to a request that only has a model loaded, or unloaded."""
    reason: DoneReason = "unload" if unloads else "load"
    figures = asdict(watch.load_figures())
    return shape("", "", [], None, model=model, created_at=now(), done=True, done_reason=reason, **figures)


async def send_whole(request: web.Request, settings: ApiSettings, answer: AnswerPart) -> web.StreamResponse:
    """Return the response of one document; a line of the request's stream, where that has begun."""
    if not call_of(request).began:
        return json_response(answer)
    async with ChunkStream(request, settings, JSON_LINES) as chunks:
        await chunks.send(answer)
    return chunks.response


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
            return json_response(await self._complete(generation))
        async with ChunkStream(request, settings, JSON_LINES) as chunks:
            async for delta in self._deltas(generation):
                prose, calls = self._calls.read(delta.text, ended=delta.finish is not None)
                logprobs = self._logprobs(delta)
                if delta.thinking:
                    await chunks.send(self._part("", delta.thinking, [], None, done=False, logprobs=logprobs or UNSET))
                    logprobs = []
                if prose or calls or logprobs:
                    await chunks.send(self._part(prose, "", calls, None, done=False, logprobs=logprobs or UNSET))
                if delta.finish is not None:
                    await chunks.send(self._last("", "", [], [], generation, delta))
        return chunks.response

    async def _complete(self, generation: Generation) -> AnswerPart:
        deltas = [delta async for delta in self._deltas(generation)]
        prose, calls = self._calls.read("".join(delta.text for delta in deltas), ended=True)
        thinking = "".join(delta.thinking for delta in deltas)
        logprobs = [entry for delta in deltas for entry in self._logprobs(delta)]
        return self._last(prose, thinking, calls, logprobs, generation, deltas[-1])

    async def _deltas(self, generation: Generation) -> AsyncGenerator[StreamDelta, None]:
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._ids.extend(delta.token_ids)
                yield delta

    def _last(
        self,
        text: str,
        thinking: str,
        calls: list[ToolCalled],
        logprobs: list[ChatLogprob],
        generation: Generation,
        delta: StreamDelta,
    ) -> AnswerPart:
        [row] = generation.work.rows
        fields = {"done_reason": done_reason(delta.finish), "logprobs": logprobs or UNSET, "why": generation.why}
        return self._part(text, thinking, calls, self._ids, done=True, **fields, **asdict(self._watch.figures(row)))

    def _part(
        self, text: str, thinking: str, calls: list[ToolCalled], ids: list[int] | None, **fields: Any
    ) -> AnswerPart:
        return self._shape(text, thinking, calls, ids, model=self._model.name, created_at=now(), **fields)

    def _logprobs(self, delta: StreamDelta) -> list[ChatLogprob]:
        return chat_logprobs(delta.logprobs, self._text).content if self._text is not None else []
