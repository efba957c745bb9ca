"""ConversationLink: what the chat screen asks of an engine: answers as they come, and what a draft would take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from engine.backends.base import FinishReason
from engine.config import SamplingParams


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of an answer, with the running numbers. finish is set on the last one only."""

    text: str
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
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = "", *, continue_answer: bool = False
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator (aclose) cancels the request.

        continue_answer: the last message is an answer that the model goes on with; the deltas hold what is new.
        """

    async def count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str = "") -> DraftCount:
        """What asking `draft` after `messages` would take. It wakes no model that sleeps; raises NoModelLoaded,
        or InvalidRequest where the model's template refuses the messages."""
