"""What Ollama's endpoints answer, and how long it took: every duration was measured, in nanoseconds."""

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
    """What an answer took; they come with its end. load_duration: waiting for the model, which may have slept.

    prompt_eval_duration: from when a worker took the request to its first token; what it waited before that for a
    place is part of the total alone.  eval_duration: from the first token to the last.
    """

    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Stopwatch:
    """The times of one request, from here on. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._load_s = 0.0

    async def loading(self, model: Awaitable[T]) -> T:
        """Wait for a model."""
        began = self._clock()
        try:
            return await model
        finally:
            self._load_s = self._clock() - began

    @property
    def total_ns(self) -> int:
        """Since it came."""
        return _ns(self._clock() - self._began)

    @property
    def load_ns(self) -> int:
        """Waited for the model."""
        return _ns(self._load_s)

    def loaded(self) -> Figures:
        """Of a request that only wanted the model to be there."""
        return Figures(total_duration=self.total_ns, load_duration=self.load_ns)

    def figures(self, row: RequestRow) -> Figures:
        """Of an answer that has ended; row: its line in the request table."""
        return replace(
            self.loaded(),
            prompt_eval_count=row.prompt_tokens,
            prompt_eval_duration=0 if row.ttft_s is None else _ns(row.ttft_s - row.queued_s),
            eval_count=row.output_tokens,
            eval_duration=_ns((row.itl_s or 0.0) * max(0, row.output_tokens - 1)),
        )


class ToolFunction(msgspec.Struct, frozen=True):
    """Which tool is called, and with what. index: its place among the answer's calls."""

    index: int
    name: str
    arguments: JsonObject


class ToolCalled(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: ToolFunction


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[ToolCalled] | UnsetType = UNSET


class Part(Figures, frozen=True, kw_only=True):
    """What both endpoints' answers, and each line of a stream, have."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class Generated(Part, frozen=True, kw_only=True):
    """An answer of /api/generate, or a piece. context: the conversation's tokens, for the next request."""

    response: str
    context: Sequence[int] | UnsetType = UNSET


class Chatted(Part, frozen=True, kw_only=True):
    """An answer of /api/chat, or a piece."""

    message: Said


def done_reason(finish: FinishReason | None) -> DoneReason:
    """Why an answer ended. "timeout" is no word of Ollama's: the time that an answer may take was up."""
    return finish if finish in ("length", "timeout") else "stop"


def now() -> str:
    """`created_at`."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(max(0.0, seconds) * _NS)
