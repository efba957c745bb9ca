"""An engine without requests on virtual time: how often it publishes and reads devices, and what ends the quiet."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream
from engine.metrics import publisher
from engine.simulation.step_costs import StepCosts
from engine.snapshot import DeviceReading, Snapshot
from engine.text.tokenizer import Tokenizer
from tests.fakes.model import fake_spec
from tests.fakes.timed_workers import TimedMachine
from tests.fakes.virtual_time import VirtualLoop, run

PUBLISH_S = 0.25
COSTS = StepCosts(fixed_s=0.05, decode_s=0.001, prompt_token_s=0.0001)
QUEUED = 10_000
MAX_QUEUED_BYTES = 8 * 1024
PROMPT_TOKENS = 32


class CountingMachine(TimedMachine):
    """Counts how often its devices are read."""

    reads = 0

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """Count, and read."""
        self.reads += 1
        return super().read(pids)


class Watched:
    """An engine with a model, and what it has published."""

    def __init__(self, engine: Engine, machine: CountingMachine) -> None:
        self.engine, self.machine = engine, machine
        self.published: list[Snapshot] = []

    def submit(self, number: int = 0, tokens: int = 4) -> RequestStream:
        """Ask for some tokens."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompt_ids = [number // 200 % 200, number % 200, *range(2, PROMPT_TOKENS)]
        return self.engine.submit(GenerateRequest(prompt_ids=prompt_ids, params=params))


def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Any, **settings: Any) -> None:
    """Run a scene, a coroutine that takes Watched, once its engine has been idle for ten seconds."""
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)
    machine = CountingMachine(COSTS)
    config = EngineConfig(worker_host="thread", hang_s=0.0, **settings)

    async def main(loop: VirtualLoop) -> None:
        engine = Engine(config, new_host=machine.new_host, probe=machine)
        await engine.start()
        await engine.load(fake_spec(tmp_path))
        await asyncio.sleep(10.0)
        watched = Watched(engine, machine)
        build = publisher.build_snapshot

        def build_and_keep(**values: Any) -> Snapshot:
            watched.published.append(build(**values))
            return watched.published[-1]

        with monkeypatch.context() as patch:
            patch.setattr(publisher, "build_snapshot", build_and_keep)
            machine.reads = 0
            done: Coroutine[Any, Any, None] = scene(watched)
            await done
        await engine.close(0.0)

    run(main, Random(1))


def test_an_idle_minute_has_a_snapshot_a_second_and_a_reading_of_devices_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(watched: Watched) -> None:
        await asyncio.sleep(60.0)
        assert 59 <= len(watched.published) <= 61
        assert 29 <= watched.machine.reads <= 31
        seconds = watched.engine.snapshot().history[-60:]
        assert len({second.at for second in seconds}) == 60

    watch(tmp_path, monkeypatch, scene)


def test_a_request_ends_the_quiet_at_once_and_is_seen_to_run_and_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(watched: Watched) -> None:
        async with watched.submit(tokens=40) as stream:
            await asyncio.sleep(PUBLISH_S + 0.01)
            assert watched.engine.snapshot().running == 1
            count = len(watched.published)
            await asyncio.sleep(1.0)
            assert len(watched.published) - count >= 4
            async for _ in stream:
                pass
        await asyncio.sleep(PUBLISH_S + 0.01)
        seen = watched.engine.snapshot()
        assert (seen.running, seen.totals.finished["length"]) == (0, 1)

    watch(tmp_path, monkeypatch, scene)


def test_a_request_that_came_and_went_between_two_publications_is_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(watched: Watched) -> None:
        async with watched.submit():
            pass
        await asyncio.sleep(PUBLISH_S + 0.01)
        assert watched.engine.snapshot().totals.finished["cancelled"] == 1

    watch(tmp_path, monkeypatch, scene)


def test_what_is_logged_and_a_drain_are_seen_at_once_while_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(watched: Watched) -> None:
        watched.engine.log.append(20, "test", "a line")
        total = watched.engine.log.total
        await asyncio.sleep(PUBLISH_S + 0.01)
        assert watched.engine.snapshot().log_total == total
        await watched.engine.drain()
        assert watched.engine.snapshot().draining_since is not None

    watch(tmp_path, monkeypatch, scene)


def test_devices_are_read_each_second_while_a_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(watched: Watched) -> None:
        async with watched.submit(tokens=400):
            await asyncio.sleep(10.0)
            assert watched.machine.reads >= 9

    watch(tmp_path, monkeypatch, scene)


def test_ten_thousand_queued_requests_take_less_than_8_kib_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(stream: RequestStream) -> None:
        async with stream:
            async for _ in stream:
                pass

    async def scene(watched: Watched) -> None:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            readers = [asyncio.create_task(read(watched.submit(number, 400))) for number in range(QUEUED)]
            await asyncio.sleep(0)  # each reader gets to its first wait
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert watched.engine.publish().queued > QUEUED - 100
        assert grown / QUEUED < MAX_QUEUED_BYTES
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    watch(tmp_path, monkeypatch, scene, max_queue=QUEUED, timeout_s=0.0)
