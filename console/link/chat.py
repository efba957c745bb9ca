"""ConversationLink: what the chat screen asks of an engine: answers as they come, and what a draft would take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Any, Literal, Protocol

import msgspec

from engine.backends.base import FinishReason
from engine.config import SamplingParams


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. thinking: before an answer, which templates may show or leave out."""

    role: Literal["system", "user", "assistant"]
    content: str
    thinking: str = ""


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of an answer, with the running numbers. thinking: new text of it, before that of the answer.
    finish is set on the last one only."""

    text: str
    thinking: str = ""
    output_tokens: int
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    finish: FinishReason | None = None
    prompt_tokens: int = 0


class DraftCount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a question would send. history: all but the question's own words, with what the template adds;
    context: tokens that question and answer may have together, 0 where that is not known."""

    history: int
    draft: int
    context: int

    @property
    def left(self) -> int:
        """Tokens that remain for the answer; negative where the question cannot be sent."""
        return self.context - self.history - self.draft


class ConversationLink(Protocol):
    """Coroutines raise engine.errors.EngineError. A model's name may be that of one of its adapters."""

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator (aclose) cancels the request.

        continue_answer: the last message is an answer that the model goes on with, or thinking alone; the deltas hold
        what is new.  enable_thinking: None leaves it to the model.
        """

    async def count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str = "") -> DraftCount:
        """Count the tokens of `draft` after `messages`. It wakes no model that sleeps; raises NoModelLoaded,
        or InvalidRequest where the model's template refuses the messages."""


# Feed: a chat's deltas on their way to a screen, which is never made to draw each token.


class DeltaFeed:
    """Deltas from one loop to a screen's, where it is made: what piles up while that is busy is merged into one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._deltas: list[ChatDelta] = []
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, delta: ChatDelta) -> None:
        """Hand over a delta; safe from any thread."""
        with self._lock:
            is_first = not self._deltas
            self._deltas.append(delta)
        if is_first:  # the screen's loop has one callback to run, however many come
            self._loop.call_soon_threadsafe(self._ready.set)

    def close(self) -> None:
        """No more deltas come; safe from any thread."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._closed = True
        self._ready.set()

    def _take(self) -> ChatDelta | None:
        """Return the deltas since the last time, merged into one."""
        with self._lock:
            deltas, self._deltas = self._deltas, []
        if not deltas:
            return None
        text, thinking = "".join(each.text for each in deltas), "".join(each.thinking for each in deltas)
        return msgspec.structs.replace(deltas[-1], text=text, thinking=thinking)

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            if (delta := self._take()) is not None:
                yield delta
            elif self._closed:
                return
            if self._closed:
                self._ready.set()


async def stream_deltas(begin: Callable[[DeltaFeed], Future[Any]]) -> AsyncIterator[ChatDelta]:
    """Yield the deltas that the work of `begin` puts into its feed, until it ends; raise its error.

    Closing the iterator cancels it.
    """
    feed = DeltaFeed(asyncio.get_running_loop())
    work = begin(feed)
    work.add_done_callback(lambda _: feed.close())
    try:
        async for delta in feed:
            yield delta
        await asyncio.wrap_future(work)
    finally:
        work.cancel()
