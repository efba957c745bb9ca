"""Residency: how one model stays in memory, by the requests for it and by what its loads take."""

from __future__ import annotations

import asyncio

from engine.config import EngineConfig

HALF_LIFE_S = 1800.0


class Demand:
    """Requests for a model, each of which counts half after HALF_LIFE_S."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def add(self, now: float) -> None:
        """Count a request."""
        self._count, self._at = self.at(now) + 1, now

    def at(self, now: float) -> float:
        """Return the count at a time, in seconds of any clock."""
        return self._count * float(0.5 ** ((now - self._at) / HALF_LIFE_S))


class Residency:
    """One model's. Times are the loop's clock, in seconds.

    demand: of requests lately.  load_s: seconds of its last load.  is_evicted: it is to leave its memory to another
    model, and has not yet.
    keep_alive_s: seconds that it stays idle, by its last request, 0 for ever; None: as its settings say.
    """

    def __init__(self, now: float) -> None:
        self.demand = Demand()
        self.load_s = 0.0
        self.is_evicted = False
        self.keep_alive_s: float | None = None
        self._load_began = self._ready_since = now
        self._unloads: tuple[str, ...] = ()
        self._left: asyncio.Future[None] | None = None

    def load_began(self, now: float, unloads: tuple[str, ...] = ()) -> None:
        """Its workers are started. unloads: models that left memory for that."""
        self._load_began, self._unloads = now, unloads

    def load_ended(self, now: float) -> None:
        """It answers."""
        self._ready_since, self.load_s = now, now - self._load_began

    def unloads_since(self, at: float) -> tuple[str, ...]:
        """Return the models that left memory for its last load, where that ended after `at`."""
        return self._unloads if self._ready_since >= at else ()

    def protected_s(self, now: float) -> float:
        """Seconds until it may be evicted: a model stays at least as long as its load took."""
        return max(0.0, round(self.load_s - (now - self._ready_since), 3))

    def idle_limit_s(self, config: EngineConfig) -> float:
        """Seconds without requests after which it sleeps, 0 for never. config: its own."""
        return config.idle_unload_s if self.keep_alive_s is None else self.keep_alive_s

    def left(self) -> asyncio.Future[None]:
        """Return what is done once its memory is free, or it is not to leave it any more."""
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        return self._left

    def end_leaving(self) -> None:
        """Its memory is free, or it stays."""
        left, self._left, self.is_evicted = self._left, None, False
        if left is not None and not left.done():
            left.set_result(None)
