"""FakeConversation: a ConversationLink whose model says what it is told to, and counts words as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from console.link.chat import ChatDelta, ChatMessage, DraftCount
from engine.config import SamplingParams
from engine.errors import NoModelLoaded

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink

CONTEXT = 8192
AROUND_A_TURN = 4


class FakeConversation:
    """Belongs to a FakeLink, which scripts it: its answer, failures, held calls. `continued`: the chats that went on
    with an answer; `counted`: the drafts that were counted."""

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.context = CONTEXT
        self.continued: list[list[ChatMessage]] = []
        self.counted: list[str] = []

    async def chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = "", *, continue_answer: bool = False
    ) -> AsyncIterator[ChatDelta]:
        """`answer` in words, each a delta; hold("chat") stops before every word."""
        link = self._link
        if link.current.status.state not in ("ready", "idle"):
            raise NoModelLoaded("no model is loaded", state=link.current.status.state)
        link.chats.append((list(messages), params))
        link.chat_models.append(model)
        if continue_answer:
            self.continued.append(list(messages))
        if "chat" in link.failures:
            raise link.failures.pop("chat")
        words = link.answer_of(model).split(" ")
        try:
            for index, word in enumerate(words):
                await link.gate("chat")
                yield ChatDelta(
                    text=word if index == 0 and not continue_answer else f" {word}",
                    output_tokens=index + 1,
                    ttft_s=0.08,
                    tokens_per_s=45.0,
                    finish="stop" if index == len(words) - 1 else None,
                    prompt_tokens=24,
                )
                await asyncio.sleep(0)
        finally:
            link.closed_chats += 1

    async def count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str = "") -> DraftCount:
        """A word is a token; what stands around a turn is four."""
        await self._link.gate("count")
        if self._link.current.status.state not in ("ready", "idle"):
            raise NoModelLoaded("no model is loaded", state=self._link.current.status.state)
        self.counted.append(draft)
        said = sum(len(message.content.split()) for message in messages)
        return DraftCount(
            history=said + AROUND_A_TURN * (len(messages) + 1), draft=len(draft.split()), context=self.context
        )
