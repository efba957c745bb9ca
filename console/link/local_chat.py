"""LocalConversation: chats with an engine in this process, on its own loop; no screen ever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from weakref import ReferenceType, ref

from console.link.chat import ChatDelta, ChatMessage, DeltaFeed, DraftCount, stream_deltas
from console.runtime.loops import EngineLoop
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream, StreamDelta
from engine.errors import NoModelLoaded, from_info
from engine.requests.request import Encode
from engine.snapshot import Snapshot
from engine.text.tokenizer import Tokenizer


class LocalConversation:
    """Implements console.link.chat.ConversationLink."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._counted = _Counted()

    def chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = "", *, continue_answer: bool = False
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator cancels the request."""

        def begin(feed: DeltaFeed) -> Future[None]:
            encode = _encoder(messages, continue_answer=continue_answer)
            return self._loop.submit(_converse(self._engine, encode, params, model, feed, continue_answer))

        return stream_deltas(begin)

    async def count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str = "") -> DraftCount:
        """Count the tokens of `draft` and of what precedes it, off the loop."""
        tokenizer = self._engine.tokenizer_of(model)
        if tokenizer is None:
            raise NoModelLoaded("no model is loaded", state="unloaded")
        context = context_of(self._engine.snapshot(), model)
        return await self._counted.count(tokenizer, tuple(messages), draft, context)


class _Counted:
    """Counts drafts; what comes before a draft is counted once for all of them, in two conversations at a time."""

    def __init__(self) -> None:
        self._histories: list[tuple[ReferenceType[Tokenizer], tuple[ChatMessage, ...], int]] = []

    async def count(
        self, tokenizer: Tokenizer, messages: tuple[ChatMessage, ...], draft: str, context: int
    ) -> DraftCount:
        """Of a question that comes after `messages`."""
        words = len(await asyncio.to_thread(tokenizer.encode, draft, add_special_tokens=False))
        return DraftCount(history=await self._history(tokenizer, messages), draft=words, context=context)

    async def _history(self, tokenizer: Tokenizer, messages: tuple[ChatMessage, ...]) -> int:
        for counted_with, turns, tokens in self._histories:
            if counted_with() is tokenizer and turns == messages:
                return tokens
        tokens = len(await _encoder([*messages, ChatMessage(role="user", content="")])(tokenizer))
        self._histories = [(ref(tokenizer), messages, tokens), *self._histories[:1]]
        return tokens


def context_of(snapshot: Snapshot, model: str) -> int:
    """Tokens of context that the model of that name (or of that adapter; "" is the first) has; 0 where not known."""
    named = (
        each.status.model
        for each in snapshot.models
        if model and (each.name == model or any(adapter.name == model for adapter in each.adapters))
    )
    loaded = next(named, None) if model else snapshot.status.model
    return loaded.max_model_len if loaded is not None else 0


def _encoder(messages: Sequence[ChatMessage], *, continue_answer: bool = False) -> Encode:
    """Return a function from a model's tokenizer to the prompt ids of the messages."""
    turns = [{"role": turn.role, "content": turn.content} for turn in messages]

    async def encode(tokenizer: Tokenizer) -> list[int]:
        text = await tokenizer.apply_chat_template(
            turns, add_generation_prompt=not continue_answer, continue_final=continue_answer
        )
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)

    return encode


async def _converse(
    engine: Engine,
    encode: Encode,
    params: SamplingParams,
    model: str,
    feed: DeltaFeed,
    continue_answer: bool,
) -> None:
    """Encode off the loop, submit and forward one chat; runs on the engine's loop."""
    serving = await engine.serving(model)
    request = GenerateRequest(
        prompt_ids=await encode(serving.tokenizer),
        params=params,
        source="chat",
        client="console",
        tenant="console",
        model=model,
        key=serving.key,
        adapter=serving.adapter,
        encode=encode,
        continues=continue_answer,
    )
    stream = engine.submit(request)
    try:
        await forward(stream, feed)
    finally:
        await stream.aclose()


async def forward(stream: RequestStream, feed: DeltaFeed) -> None:
    """Put an answer into `feed` as it comes. Raises EngineError where it ends with one."""
    gaps_s, num_gaps = 0.0, 0
    async for delta in stream:
        gaps_s, num_gaps = gaps_s + sum(delta.gaps), num_gaps + len(delta.gaps)
        feed.put(_chat_delta(delta, num_gaps / gaps_s if gaps_s else None))
        if delta.error is not None:
            raise from_info(delta.error)


def _chat_delta(delta: StreamDelta, tokens_per_s: float | None) -> ChatDelta:
    return ChatDelta(
        text=delta.text,
        output_tokens=delta.output_tokens,
        ttft_s=delta.ttft_s,
        tokens_per_s=tokens_per_s,
        finish=delta.finish,
        prompt_tokens=delta.prompt_tokens,
    )
