"""What goes wrong during the chaos: workers are killed, crash and hang, one at a time or all at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

from engine.engine import Engine

_KINDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
_ALL_AT_ONCE_OF = 8


class Saboteur:
    """Sends signals to worker processes at random. struck: by signal; pids: those that got one."""

    def __init__(self, engine: Engine, *, every_s: float, seed: int) -> None:
        self.struck: Counter[str] = Counter()
        self.pids: set[int] = set()
        self._engine = engine
        self._every_s = every_s
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """Go on for ever, each time after a random while."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._every_s))
            pids = [each.pid for each in self._engine.publish().workers if each.pid is not None]
            victims = pids if self._rng.randrange(_ALL_AT_ONCE_OF) == 0 else pids and [self._rng.choice(pids)]
            kind = self._rng.choice(_KINDS)
            for pid in victims:
                self._strike(pid, kind)

    def _strike(self, pid: int, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
            if pid not in self.pids:
                self.struck[kind.name] += 1
            self.pids.add(pid)
