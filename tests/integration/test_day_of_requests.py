"""A day of requests through the whole engine on virtual time: memory is as it was in the morning.

What happens once a second otherwise happens every SECOND_S here, or a day would take minutes.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
import pytest

from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import EngineError
from engine.metrics import publisher
from engine.requests import history
from engine.simulation.step_costs import StepCosts
from engine.text.tokenizer import Tokenizer
from tests.fakes import timed_workers
from tests.fakes.model import fake_spec
from tests.fakes.timed_workers import TimedMachine
from tests.fakes.virtual_time import VirtualLoop, run

HOUR_S = 3600.0
SECOND_S = 5.0
CLIENTS = 6
KEPT_ROWS = 200
"""Of the history of requests, so that it is full within the first hours."""
COSTS = StepCosts(fixed_s=0.01, decode_s=0.002, prompt_token_s=0.0005)
MORNING, EVENING = 8, 24
MAX_OBJECTS, MAX_BLOCKS, MAX_BYTES = 1000, 5000, 48 * 2**20
"""That may be more, of marks and lists that are bounded but not full yet. If each request left something, that would be
more than 5,000. Bytes: the allocator leaves holes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Day:
    """Clients that ask, leave in the middle and ask for too much, while workers die, knobs are turned and the model is
    replaced by itself. ended: requests by how they ended."""

    def __init__(self, engine: Engine, spec: ModelSpec, machine: TimedMachine, loop: VirtualLoop) -> None:
        self.ended: Counter[str] = Counter()
        self._engine, self._spec, self._machine = engine, spec, machine
        self._loop, self._chance = loop, loop.random
        self._numbers = count()

    async def client(self, name: str, until_s: float) -> None:
        """Ask until then, with pauses."""
        while self._loop.now < until_s:
            await asyncio.sleep(self._chance.expovariate(1 / 60))
            await self._ask(name)

    async def operate(self, until_s: float) -> None:
        """Do something every half hour."""
        for turn in count():
            await asyncio.sleep(HOUR_S / 2)
            if self._loop.now >= until_s:
                return
            if turn % 4 == 0:
                self._chance.choice([host for host in self._machine.hosts if host.alive]).kill()
            elif turn % 4 == 1:
                await self._engine.reconfigure(max_prompts=2 + turn % 7, step_tokens=256 + turn)
            elif turn % 4 == 2:
                await self._engine.load(self._spec, num_workers=2)
            del self._machine.hosts[:-4]

    async def _ask(self, client: str) -> None:
        chance, number = self._chance, next(self._numbers)
        size = chance.choice((40, 120, 300, 6000 if number % 50 == 0 else 40))
        prompt_ids = [number // 200 % 200, number % 200, *(1 + each % 200 for each in range(size))]
        params = SamplingParams(max_tokens=chance.randrange(1, 8), ignore_eos=True)
        leaves = number % 9 == 0
        try:
            request = GenerateRequest(prompt_ids=prompt_ids, params=params, client=client)
            async with self._engine.submit(request) as stream:
                async for delta in stream:
                    if leaves:
                        break
                    if delta.finish is not None:
                        self.ended[delta.finish] += 1
            self.ended["left"] += leaves
        except EngineError as error:
            self.ended[error.code] += 1


class Holdings(NamedTuple):
    """Objects that the garbage collector knows, blocks of memory of all of Python's, and bytes of the process."""

    objects: int
    blocks: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Holdings:
        """Return what is held without garbage."""
        gc.collect()
        return cls(len(gc.get_objects()), sys.getallocatedblocks(), psutil.Process().memory_info().rss)


def test_after_a_day_of_requests_memory_is_as_it_was_in_the_morning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)
    monkeypatch.setattr(publisher, "_TICK_S", SECOND_S)
    monkeypatch.setattr(timed_workers, "HEARTBEAT_S", SECOND_S)
    monkeypatch.setattr(history, "KEPT_ROWS", KEPT_ROWS)
    machine = TimedMachine(COSTS)
    config = EngineConfig(worker_host="thread", timeout_s=30.0, hang_s=0.0, max_prompts=4)
    held: dict[int, Holdings] = {}

    async def main(loop: VirtualLoop) -> Day:
        engine = Engine(config, new_host=machine.new_host, probe=machine)
        engine._publisher.publish_s = 6 * SECOND_S
        await engine.start()
        spec = fake_spec(tmp_path)
        await engine.load(spec, num_workers=2)
        day = Day(engine, spec, machine, loop)
        for hour in (MORNING, EVENING):
            until_s = hour * HOUR_S
            clients = (day.client(f"client {number}", until_s) for number in range(CLIENTS))
            await asyncio.gather(day.operate(until_s), *clients)
            await asyncio.sleep(120.0)
            engine.check()
            assert not engine.snapshot().running + engine.snapshot().queued
            held[hour] = Holdings.now()
        with suppress(EngineError):
            await engine.close(0.0)
        return day

    ended = run(main, Random(3), limit_s=2e5).ended
    assert ended["length"] > 4000
    assert ended["left"] > 300
    assert ended["context_length_exceeded"] > 20
    before, after = held[MORNING], held[EVENING]
    assert after.objects - before.objects < MAX_OBJECTS, held
    assert after.blocks - before.blocks < MAX_BLOCKS, held
    assert after.rss_bytes - before.rss_bytes < MAX_BYTES, held
