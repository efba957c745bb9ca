"""How far the weights are, in bytes: the library counts modules, the files' headers know their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from engine.backends.base import LoadPhase, LoadProgress
from engine.backends.exllama.sizes import module_bytes, stored_bytes
from engine.errors import LoadCancelled
from engine.models.headers import TensorHeader

Report = Callable[[LoadProgress], None]


class WeightsProgress:
    """Reports over all models of a load together, and ends the load between two modules where it is cancelled."""

    def __init__(self, report: Report, cancelled: Callable[[], bool], total_bytes: int) -> None:
        self._report = report
        self._cancelled = cancelled
        self._total_bytes = total_bytes
        self._before_bytes = 0

    def callback(self, model: Any, tensors: Mapping[str, TensorHeader]) -> Callable[[int, int], None]:
        """What the library calls before it loads module `index` of `count` of `model`, and once at the end. Models
        are loaded one after the other."""
        keys = [[*(each.key for each in module.submodules), module.key] for module in model.modules]
        reached = [0, *accumulate(module_bytes(tensors, keys))]
        before, self._before_bytes = self._before_bytes, self._before_bytes + stored_bytes(tensors)

        def step(index: int, count: int) -> None:
            self.raise_if_cancelled()
            self._say("weights", before + reached[min(index, count)], self._total_bytes)

        return step

    def cache(self, cache_bytes: int, *, done: bool) -> None:
        """Report the cache, which is allocated in one go."""
        self.raise_if_cancelled()
        self._say("kv_cache", cache_bytes if done else 0, cache_bytes)

    def raise_if_cancelled(self) -> None:
        """Raise LoadCancelled where it was."""
        if self._cancelled():
            raise LoadCancelled("the load was cancelled")

    def _say(self, phase: LoadPhase, done: int, total: int) -> None:
        self._report(LoadProgress(phase=phase, done=done, total=total))
