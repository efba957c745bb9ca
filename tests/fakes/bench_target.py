"""A bench's target whose answers are foretold, and which remembers what it was asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from console.bench.result import TargetInfo
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item, Prompt
from engine.errors import EngineError
from engine.snapshot import Totals


class PlainIds:
    """Material: ids below 1000, and a token for each character of a text."""

    def prompt(self, tokens: int, rng: random.Random) -> Prompt:
        """So many."""
        return Prompt(tokens, ids=tuple(rng.choices(range(1000), k=tokens)))

    def of_text(self, text: str) -> Prompt:
        """Its characters."""
        return Prompt(len(text), ids=tuple(map(ord, text)))

    def count(self, text: str) -> int:
        """Characters."""
        return len(text)


class FakeTarget:
    """Target: a chunk of a token in each turn of the loop. fails: numbers of requests, in order, that get an error.

    forever: answers never end.  short: every answer has so many tokens fewer.  most: requests that were under way at
    once.
    """

    def __init__(
        self,
        *,
        fails: Sequence[int] = (),
        short: int = 0,
        forever: bool = False,
        max_model_len: int | None = None,
        kind: str = "engine",
    ) -> None:
        self.info = TargetInfo(kind="http" if kind == "http" else "engine", model="fake", counted_by="usage")
        self.material = PlainIds()
        self.settings = {"num_workers": 1}
        self.max_model_len = max_model_len
        self.asked: list[Item] = []
        self.closed: list[Item] = []
        self.most = self._now = 0
        self._fails, self._short, self._forever = frozenset(fails), short, forever

    async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        """Target."""
        number = len(self.asked)
        self.asked.append(item)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if number in self._fails:
                raise TargetFailed("told to fail")
            for _ in range(item.output_tokens - self._short):
                await asyncio.sleep(0)
                yield Chunk(tokens=1)
            while self._forever:
                await asyncio.sleep(0.001)
                yield Chunk(tokens=1)
            yield Chunk(output_tokens=item.output_tokens - self._short, prompt_tokens=item.prompt.tokens)
        finally:
            self._now -= 1
            self.closed.append(item)


class TurnedTarget(FakeTarget):
    """EngineHere: knobs that can be turned. stuck: from then on, workers that never get ready; set by the test.

    turned: what was asked for, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.knobs = (1, 16)
        self.turned: list[tuple[int, int]] = []
        self.stuck: EngineError | Literal[True] | None = None

    async def set_knobs(self, *, workers: int, max_prompts: int) -> None:
        """EngineHere."""
        self.knobs = workers, max_prompts
        self.turned.append(self.knobs)
        if isinstance(self.stuck, EngineError):
            raise self.stuck
        if self.stuck:
            await asyncio.Event().wait()

    def totals(self) -> Totals:
        """EngineHere."""
        return Totals()

    async def set_draft_tokens(self, tokens: int) -> None:
        """EngineHere."""

    async def load_s(self) -> float:
        """EngineHere."""
        return 0.0

    def weight_files(self) -> list[str]:
        """EngineHere."""
        return []
