"""Times between tokens are those of the worker that made them, however late and however many together they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from console.link.chat import DeltaFeed
from console.link.local_chat import forward
from engine.config import ModelSpec
from engine.engine import Engine
from engine.metrics.meter import ITL
from engine.snapshot import Histogram
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import Event, RequestOutput, Submit
from tests.fakes.engines import StillProbe, ask, config, read, until
from tests.fakes.hosts import PlayedHost
from tests.fakes.model import fake_spec

TOKENS = 11
GAP_S = 0.25
"""Far from anything that passes between two messages of a played worker."""


class Worker(PlayedHost):
    """Loads once it is started; the rest is up to the test."""

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        await super().start(on_event, on_exit)
        asyncio.get_running_loop().call_soon(self.load)

    @property
    def asked(self) -> list[str]:
        """The requests that it was given."""
        return [each.request.id for each in self.commands if isinstance(each, Submit)]

    def first(self, request_id: str) -> None:
        """A step brings the first token that this worker has for a request."""
        self.step(RequestOutput(request_id=request_id, token_ids=[97], text="a", cached_tokens=0))

    def more(self, request_id: str, *, last: bool = False) -> None:
        """A step brings one more."""
        finish = "length" if last else None
        self.step(RequestOutput(request_id=request_id, token_ids=[98], text="b", gaps=[GAP_S], finish=finish))


@asynccontextmanager
async def played(folder: Path, **settings: object) -> AsyncIterator[tuple[Engine, list[Worker]]]:
    """An engine with a model on a worker that the test plays, and all workers so far."""
    workers: list[Worker] = []

    def new_host(worker_id: str, spec: ModelSpec) -> Worker:
        workers.append(Worker())
        return workers[-1]

    engine = Engine(config(**settings), new_host=new_host, probe=StillProbe())
    await engine.start()
    try:
        await engine.load(fake_spec(folder))
        yield engine, workers
    finally:
        await engine.close(drain_s=0.0)


def between_tokens(engine: Engine) -> Histogram:
    """What /metrics tells of the model's times between tokens."""
    [usage] = engine.usage()
    return usage.histograms[ITL]


async def test_tokens_that_arrive_in_one_burst_keep_the_times_that_their_worker_measured(tmp_path: Path) -> None:
    async with played(tmp_path, slo_itl_s=GAP_S / 2) as (engine, [worker]):
        stream = engine.submit(ask("x", max_tokens=TOKENS, id="r"))
        reading = asyncio.create_task(read(stream))
        await until(lambda: worker.asked)
        worker.first(worker.asked[0])
        for number in range(2, TOKENS + 1):
            worker.more(worker.asked[0], last=number == TOKENS)
        answer = await reading
        assert [gap for delta in answer.deltas for gap in delta.gaps] == [GAP_S] * (TOKENS - 1)
        row = stream.row
        assert row is not None
        assert (row.itl_s, row.tokens_per_s) == (pytest.approx(GAP_S), pytest.approx(1 / GAP_S))
        histogram = between_tokens(engine)
        assert (histogram.count, histogram.sum) == (TOKENS - 1, pytest.approx(GAP_S * (TOKENS - 1)))
        await until(lambda: engine.publish().itl.p50 is not None)
        snapshot = engine.publish()
        assert (snapshot.itl.p50, snapshot.itl.p99) == (GAP_S, GAP_S)
        assert (snapshot.insight.goodput.judged, snapshot.insight.goodput.within_slo) == (1, 0)


async def test_a_chat_says_how_fast_its_worker_is_however_its_tokens_arrive(tmp_path: Path) -> None:
    async with played(tmp_path) as (engine, [worker]):
        feed = DeltaFeed(asyncio.get_running_loop())
        stream = engine.submit(ask("x", max_tokens=TOKENS, id="r"))
        reading = asyncio.create_task(forward(stream, feed))
        shown = aiter(feed)
        await until(lambda: worker.asked)
        worker.first(worker.asked[0])
        for number in range(2, TOKENS + 1):
            worker.more(worker.asked[0], last=number == TOKENS)
        await reading
        delta = await anext(shown)
        assert (delta.output_tokens, delta.tokens_per_s) == (TOKENS, pytest.approx(1 / GAP_S))


async def test_the_time_without_a_worker_is_the_gap_that_the_client_saw(tmp_path: Path) -> None:
    async with played(tmp_path) as (engine, workers):
        stream = engine.submit(ask("x", max_tokens=5, id="r"))
        reading = asyncio.create_task(read(stream))
        await until(lambda: workers[0].asked)
        workers[0].take()
        workers[0].first(workers[0].asked[0])
        workers[0].more(workers[0].asked[0])
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        workers[0].end(WorkerExit(signal="SIGKILL"))
        await until(lambda: len(workers) > 1 and workers[1].asked)
        pause_s = loop.time() - last_s
        workers[1].first(workers[1].asked[0])
        for number in (4, 5):
            workers[1].more(workers[1].asked[0], last=number == 5)
        answer = await reading
        gaps = [gap for delta in answer.deltas for gap in delta.gaps]
        assert gaps == [GAP_S, gaps[1], GAP_S, GAP_S]
        assert pause_s <= gaps[1] <= loop.time() - last_s
        assert between_tokens(engine).count == 4
        assert stream.row is not None
        assert stream.row.itl_s == pytest.approx(sum(gaps) / 4)
