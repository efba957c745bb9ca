"""Prompts of dialects that cut what is too long: its end is what the answer goes on from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from console.api.prompts import Prompt
from console.api.served import ServedModel
from engine.config import shown
from engine.errors import InvalidRequest
from engine.request import compact
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text becomes a prompt. limit: most tokens that are kept, the last ones but for a start token and `head`.

    head: a text that stands before it and is never cut.  add_special_tokens: whether the model's own go around it.
    """

    text: str
    limit: int
    head: str = ""
    add_special_tokens: bool = True

    async def __call__(self, tokenizer: Tokenizer) -> list[int]:
        """The ids for a model, which may be another than the one that the limit is of."""
        return await asyncio.to_thread(self._encode, tokenizer)

    def _encode(self, tokenizer: Tokenizer) -> list[int]:
        start = tokenizer.encode(self.head, add_special_tokens=self.add_special_tokens) if self.head else []
        return self._joined(start, tokenizer.encode(self.text, add_special_tokens=self._adds), tokenizer)

    async def prompt(self, model: ServedModel) -> Prompt:
        """The same, where it is long beside the event loop. Raises InvalidRequest where nothing is left."""
        text = await model.part(self.text, self.limit, end=True)
        [start] = await model.encode([self.head], add_special_tokens=self.add_special_tokens) if self.head else [[]]
        [ids] = await model.encode([text], add_special_tokens=self._adds)
        if len(start) >= self.limit:
            raise InvalidRequest(
                f"memory has {len(start)} tokens; with the prompt there may be {self.limit}", param="memory"
            )
        whole = self._joined(start, ids, model.tokenizer)
        if not whole:
            raise InvalidRequest("prompt is empty; there is nothing to continue", param="prompt")
        return Prompt(compact(whole), self.head + self.text, replace(self, text=text))

    @property
    def _adds(self) -> bool:
        """Whether the text itself, after its head, gets special tokens."""
        return self.add_special_tokens and not self.head

    def _joined(self, start: list[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
        if not start and ids[:1] == [tokenizer.bos_token_id]:
            start, ids = ids[:1], ids[1:]
        return [*start, *ids[-max(1, self.limit - len(start)) :]]


def room_for_prompt(max_tokens: int, wanted: int | None, model: ServedModel, *, answer: str, context: str) -> int:
    """How many tokens a prompt may have, so that an answer of `max_tokens` fits: in a context of `wanted` tokens, or in
    all that there is.

    answer, context: what the client calls the two. Raises InvalidRequest where no room is left.
    """
    most = model.loaded.max_model_len
    limit = most if wanted is None else min(wanted, most)
    if max_tokens >= limit:
        raise InvalidRequest(
            f"{answer} is {shown(max_tokens)}; of the {limit} tokens of {context} that leaves none for the prompt",
            param=answer,
        )
    return limit - max_tokens
