"""LocalConversation: chats with an engine in this process, on its own loop; no screen ever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

from console.link.chat import ChatDelta, ChatMessage, DeltaFeed, DraftCount, stream_deltas
from console.runtime.loops import EngineLoop
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream, StreamDelta
from engine.errors import NoModelLoaded, from_info
from engine.snapshot import Snapshot
from engine.text.thinking import (
    begun_in,
    format_of,
    reopened,
    template_variables,
    thinking_to_continue,
    with_thinking,
)
from engine.text.tokenizer import Tokenizer


class LocalConversation:
    """Implements console.link.chat.ConversationLink."""

    def __init__(self, engine: Engine, loop: EngineLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._counted = _Counted()

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator cancels the request."""

        def begin(feed: DeltaFeed) -> Future[None]:
            prompt = _Prompt(messages, continues=continue_answer, enable_thinking=enable_thinking)
            return self._loop.submit(_converse(self._engine, prompt, params, model, feed))

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
        tokens = len(await _Prompt([*messages, ChatMessage(role="user", content="")]).ids(tokenizer))
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


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a chat, as text and as ids. The fields are those of `ConversationLink.chat`."""

    messages: Sequence[ChatMessage]
    continues: bool = False
    enable_thinking: bool | None = None

    async def text(self, tokenizer: Tokenizer, thinking: str = "auto") -> str:
        """Return the text for a model. thinking: the model's setting, as `format_of` takes it."""
        turns = list(map(_turn, self.messages))
        stopped = thinking_to_continue(turns) if self.continues else ""
        text = await tokenizer.apply_chat_template(
            turns[:-1] if stopped else turns,
            add_generation_prompt=bool(stopped) or not self.continues,
            continue_final=self.continues and not stopped,
            **template_variables(self.enable_thinking),
        )
        return reopened(format_of(tokenizer, thinking), text, stopped) if stopped else text

    async def ids(self, tokenizer: Tokenizer, thinking: str = "auto") -> list[int]:
        """Return the text's tokens, made off the loop."""
        text = await self.text(tokenizer, thinking)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)


def _turn(message: ChatMessage) -> dict[str, object]:
    """Return a message as chat templates read it, which name thinking in two ways."""
    turn: dict[str, object] = {"role": message.role, "content": message.content}
    return turn | ({"reasoning_content": message.thinking, "thinking": message.thinking} if message.thinking else {})


async def _converse(engine: Engine, prompt: _Prompt, params: SamplingParams, model: str, feed: DeltaFeed) -> None:
    """Encode off the loop, submit and forward one chat; runs on the engine's loop."""
    serving = await engine.serving(model)
    tokenizer, thinking = serving.tokenizer, serving.spec.thinking
    text = await prompt.text(tokenizer, thinking)
    request = GenerateRequest(
        prompt_ids=await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False),
        params=with_thinking(
            format_of(tokenizer, thinking),
            params,
            tokenizer,
            text,
            begun=begun_in(list(map(_turn, prompt.messages))) if prompt.continues else "",
            budget=0 if prompt.enable_thinking is False else None,
        ),
        source="chat",
        client="console",
        tenant="console",
        model=model,
        key=serving.key,
        adapter=serving.adapter,
        encode=partial(prompt.ids, thinking=thinking),
        continues=prompt.continues,
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
        thinking=delta.thinking,
        output_tokens=delta.output_tokens,
        ttft_s=delta.ttft_s,
        tokens_per_s=tokens_per_s,
        finish=delta.finish,
        prompt_tokens=delta.prompt_tokens,
    )
