"""Ranks of tensor parallelism as threads of the test: the same calls as between processes, over a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.backends.common.model_config import Shard
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from tests.fakes.oracle import NUM_PAGES, PAGE_TOKENS, ignore_progress, never

T = TypeVar("T")

PATIENCE_S = 60.0


class ThreadGroup:
    """`Group` of one rank. meeting, slots: the same for all ranks."""

    def __init__(self, shard: Shard, meeting: threading.Barrier, slots: list[Tensor]) -> None:
        self.shard, self._meeting, self._slots = shard, meeting, slots
        self.reductions = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up in the order of the ranks."""
        self.reductions += 1
        parts = self._exchange(x.clone())
        return x.copy_(torch.stack(parts).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate."""
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """Take rank 0's."""
        x.copy_(self._exchange(x.clone())[0])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self.shard.rank] = x
        self._meeting.wait(PATIENCE_S)
        found = list(self._slots)
        self._meeting.wait(PATIENCE_S)
        return found


class Ranks:
    """Runners of all ranks of a model, with the same KV pages each."""

    def __init__(self, folder: Path, size: int, *, page_tokens: int = PAGE_TOKENS, **spec: Any) -> None:
        meeting, slots = threading.Barrier(size), [torch.empty(0)] * size
        self.groups = [ThreadGroup(Shard(rank, size), meeting, slots) for rank in range(size)]
        settings = ModelSpec(**{"path": folder, "name": "tiny", "dtype": "float32", "device": "cpu"} | spec)

        def load(group: ThreadGroup) -> ModelRunner:
            runner = ModelRunner.load(folder, settings, report=ignore_progress, cancelled=never, group=group)
            runner.allocate_kv(NUM_PAGES, page_tokens, report=ignore_progress)
            return runner

        self.runners = self.each(load, self.groups)

    def each(self, work: Callable[[Any], T], of: Sequence[Any]) -> list[T]:
        """Do the same for all ranks at once, with one of `of` each."""
        with ThreadPoolExecutor(len(of)) as threads:
            return list(threads.map(work, of))
