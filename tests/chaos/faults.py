"""What goes wrong during the chaos: workers are killed, crash and hang, one at a time or all at once, and the processes
that fork them and hold their memory are killed and hang too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

from engine.engine import Engine

_KINDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
_OTHER_KINDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
_ALL_AT_ONCE_OF = 8
_OTHERS_OF = 3


class Saboteur:
    """Sends signals to processes at random. struck: how many got one, by signal; pids: those of workers."""

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
            if self._rng.randrange(_OTHERS_OF) == 0:
                self._strike_other()

    def _strike_other(self) -> None:
        """Strike the process that forks workers, or one that holds the memory of one."""
        forks = self._engine._models._forks
        if forks is not None and (pids := sorted(forks.pids)):
            with contextlib.suppress(ProcessLookupError):
                kind = self._rng.choice(_OTHER_KINDS)
                os.kill(self._rng.choice(pids), kind)
                self.struck[f"{kind.name} of others"] += 1

    def _strike(self, pid: int, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind)
            if pid not in self.pids:
                self.struck[kind.name] += 1
            self.pids.add(pid)
