"""Shared system prompts over four workers: as many tokens found in caches as on one, and no worker idle for it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec
from engine.engine import Engine
from engine.requests.request import Request
from engine.scheduling.routing import StepPrice
from tests.fakes.engines import StillProbe, all_ready, ask, config, read
from tests.fakes.requests import make_request
from tests.fakes.simulated_workers import Outcome, SimulatedWorker, run
from tests.fakes.tiny_models import make_tiny_model

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
