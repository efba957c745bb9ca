"""Shared system prompts over four workers: as many tokens found in caches as on one, and no worker idle for it."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.backends.base import BackendStats, PrefixChanges, SequenceStats
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence
from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec
from engine.engine import Engine
from engine.requests.request import Request
from engine.scheduling.queue import Dispatcher, Slot
from engine.scheduling.routing import StepPrice
from engine.worker_process.protocol import RequestOutput, StepBatch
from tests.fakes.engines import StillProbe, all_ready, ask, config, read
from tests.fakes.requests import make_request
from tests.fakes.scheduling import still_clock
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS = 16
SALT = b"salt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. hit_rate: of prompt tokens; makespan_s: until the last answer; most_active: by worker."""

    hit_rate: float
    makespan_s: float
    most_active: tuple[int, ...]
    ttft_s: tuple[float, ...]


class SimulatedWorker:
    """One worker; `reports`: whether it tells its pages."""

    def __init__(self, name: str, price: StepPrice, *, pages: int, max_prompts: int, reports: bool = True) -> None:
        self.name = name
        self.pool = PagePool(pages, PAGE_TOKENS, SALT)
        self.scheduler = Scheduler(
            self.pool, max_prompts=max_prompts, step_tokens=512, max_model_len=8192, clock=still_clock
        )
        self.requests: dict[str, Request] = {}
        self.most_active = 0
        self._price = price
        self._reports = reports
        self._told: set[str] = set()

    def submit(self, request: Request) -> None:
        """Take a request."""
        self.requests[request.wire_id] = request
        self.most_active = max(self.most_active, len(self.requests))
        self.scheduler.submit(Sequence(request.wire_id, list(request.prompt_ids), len(request.prompt_ids)))

    def step(self) -> StepBatch:
        """One step for everybody. Answers end at their max_tokens."""
        plan = self.scheduler.plan()
        sampled = plan.sampled_sequences
        fed = sum(len(chunk.token_ids) for chunk in plan.chunks)
        answers = sum(seq.num_tokens > seq.prompt_tokens for seq in sampled)
        self.scheduler.commit(plan, [[5]] * len(sampled))
        outputs = [self._output(sequence) for sequence in sampled]
        price, counters = self._price, self.scheduler.counters
        live = (*self.scheduler.running, *self.scheduler.waiting)
        return StepBatch(
            outputs=outputs,
            answers=answers,
            step_s=price.fixed_s + (fed - answers) * price.prompt_token_s + answers * price.answer_s,
            stats=BackendStats(
                prompt_tokens_computed=counters.prompt_tokens_computed,
                sequences=tuple(
                    SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.num_tokens)
                    for each in live
                ),
            ),
            prefix=self.pool.take_changes() if self._reports else PrefixChanges(),
        )

    def _output(self, sequence: Sequence) -> RequestOutput:
        request = self.requests[sequence.id]
        request.generated.append(5)
        first = sequence.id not in self._told
        self._told.add(sequence.id)
        finished = len(request.generated) >= (request.params.max_tokens or 0)
        if finished:
            self.scheduler.remove(sequence)
            del self.requests[sequence.id]
        return RequestOutput(
            request_id=sequence.id,
            token_ids=[5],
            finish="length" if finished else None,
            cached_tokens=sequence.cached_tokens if first else None,
        )


def run(requests: Many[Request], workers: Many[SimulatedWorker], *, max_prompts: int) -> Outcome:
    """Serve requests that arrive at their `created` until the last has ended."""
    dispatcher = Dispatcher(page_tokens=PAGE_TOKENS, salt=SALT)
    by_name = {worker.name: worker for worker in workers}
    by_id = {request.wire_id: request for request in requests}
    arrivals = sorted(requests, key=lambda each: (each.created, each.order), reverse=True)
    ends: list[tuple[float, str, StepBatch]] = []
    busy: set[str] = set()
    ttft_s: list[float] = []
    now = 0.0
    while arrivals or ends:
        now = min([each.created for each in arrivals[-1:]] + [end for end, _, _ in ends[:1]])
        while arrivals and arrivals[-1].created <= now:
            dispatcher.add(arrivals.pop())
        while ends and ends[0][0] <= now:
            _, name, batch = heapq.heappop(ends)
            busy.discard(name)
            dispatcher.router.stepped(name, batch)
            for output in batch.outputs:
                request = by_id[output.request_id]
                if output.cached_tokens is not None:
                    ttft_s.append(now - request.created)
                if output.finish is not None:
                    dispatcher.remove(request)
        places = [Slot(worker=each.name, active=len(each.requests), max_prompts=max_prompts) for each in workers]
        for request, name in dispatcher.assign(places, now):
            by_name[name].submit(request)
        for worker in workers:
            if worker.requests and worker.name not in busy:
                batch = worker.step()
                busy.add(worker.name)
                heapq.heappush(ends, (now + batch.step_s, worker.name, batch))
    counters = [worker.scheduler.counters for worker in workers]
    return Outcome(
        hit_rate=sum(each.prefix_hit_tokens for each in counters) / sum(each.prefix_query_tokens for each in counters),
        makespan_s=now,
        most_active=tuple(worker.most_active for worker in workers),
        ttft_s=tuple(ttft_s),
    )


SYSTEM_TOKENS = 512
MAX_PROMPTS = 8
CPU = StepPrice(0.02, 0.002, 0.01)
GPU = StepPrice(0.02, 0.0001, 0.0002)


def prompts(number: int, systems: int, *, vocab: int = 300) -> list[list[int]]:
    """`number` prompts of users, each after one of the system prompts, in mixed order."""
    rng = random.Random(number)
    shared = [[rng.randrange(3, vocab) for _ in range(SYSTEM_TOKENS)] for _ in range(systems)]
    return [[*rng.choice(shared), *(rng.randrange(3, vocab) for _ in range(24))] for _ in range(number)]


def arriving(users: list[list[int]], per_second: float) -> list[Request]:
    """A request for each user, so many a second; all at once where that is 0."""
    return [
        make_request(prompt, max_tokens=16, created=number / per_second if per_second else 0.0)
        for number, prompt in enumerate(users)
    ]


def served(
    requests: list[Request], workers: int, price: StepPrice, *, pages: int = 2000, reports: bool = True
) -> Outcome:
    """How it goes with so many workers."""
    team = [
        SimulatedWorker(f"w{number}", price, pages=pages, max_prompts=MAX_PROMPTS, reports=reports)
        for number in range(workers)
    ]
    return run(requests, team, max_prompts=MAX_PROMPTS)


@pytest.mark.parametrize("reports", [True, False], ids=["told", "silent"])
@pytest.mark.parametrize("per_second", [0.0, 5.0, 20.0], ids=["at_once", "5_a_second", "20_a_second"])
@pytest.mark.parametrize("price", [CPU, GPU], ids=["cpu", "gpu"])
def test_four_workers_find_as_much_in_their_caches_as_one(price: StepPrice, per_second: float, reports: bool) -> None:
    users = prompts(120 if per_second else 240, systems=8)
    one = served(arriving(users, per_second), 1, price, reports=reports)
    four = served(arriving(users, per_second), 4, price, reports=reports)
    assert four.hit_rate >= 0.9 * one.hit_rate


@pytest.mark.parametrize("per_second", [0.0, 5.0], ids=["at_once", "5_a_second"])
def test_workers_too_small_for_all_prefixes_share_them_out(per_second: float) -> None:
    """Each holds four system prompts at most, so one worker computes them again and again."""
    users = prompts(240, systems=8)
    small, large = (served(arriving(users, per_second), 4, GPU, pages=pages) for pages in (150, 2000))
    assert small.hit_rate >= 0.9 * large.hit_rate
    assert small.hit_rate >= 1.3 * served(arriving(users, per_second), 1, GPU, pages=150).hit_rate


@pytest.mark.parametrize("price", [CPU, GPU], ids=["cpu", "gpu"])
def test_one_hot_prefix_keeps_all_workers_busy_when_the_queue_builds(price: StepPrice) -> None:
    users = prompts(240, systems=1)
    one, four = (served(arriving(users, 0.0), workers, price) for workers in (1, 4))
    assert four.most_active == (MAX_PROMPTS,) * 4
    assert four.makespan_s <= one.makespan_s / 3
    assert four.hit_rate >= 0.9 * one.hit_rate


def test_prompts_without_a_shared_prefix_spread_evenly() -> None:
    users = prompts(64, systems=64)
    four = served(arriving(users, 4.0), 4, GPU)
    assert max(four.most_active) - min(four.most_active) <= 1


async def cached_share(folder: Path, workers: int) -> float:
    """Of the prompt tokens, those found in the real engine's workers' caches."""
    engine = Engine(
        config(num_workers=workers, max_prompts=MAX_PROMPTS),
        backend_factory=lambda spec: TorchBackend(),
        probe=StillProbe(),
    )
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=16384, dtype="float32"))
        await all_ready(engine)
        users = asyncio.Semaphore(12)

        async def answer(prompt: list[int]) -> None:
            async with users:
                await read(engine.submit(ask(prompt, max_tokens=4)))

        await asyncio.gather(*(answer(prompt) for prompt in prompts(160, systems=8)))
        totals = engine.publish().totals
        return totals.cached_tokens / totals.prompt_tokens
    finally:
        await engine.close(drain_s=0.0)


@pytest.mark.slow
async def test_four_workers_of_the_torch_backend_find_as_much_in_their_caches_as_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    one, four = await cached_share(folder, 1), await cached_share(folder, 4)
    assert one > 0.7
    assert four >= 0.9 * one
