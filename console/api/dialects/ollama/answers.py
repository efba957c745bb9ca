"""Answers of Ollama's endpoints, and their durations, all measured, in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from console.api.requests.logprobs import ChatLogprob
from console.api.tools import JsonObject
from engine.backends.base import FinishReason
from engine.snapshot import RequestRow

T = TypeVar("T")

DoneReason = Literal["stop", "length", "timeout", "load"]

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

    def loaded(self) -> Figures:
        """Return the figures of a request that only loads the model."""
        return Figures(total_duration=self.total_ns, load_duration=self.load_ns)

    def figures(self, row: RequestRow) -> Figures:
        """Return the figures of a finished answer. row: of the request table."""
        return replace(
            self.loaded(),
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
    """The answering message, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[ToolCalled] | UnsetType = UNSET


class AnswerPart(Figures, frozen=True, kw_only=True):
    """Fields of both endpoints' answers and of each line of a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class Generated(AnswerPart, frozen=True, kw_only=True):
    """An answer of /api/generate, or a piece. context: the conversation's tokens, for the next request."""

    response: str
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
