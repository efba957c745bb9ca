"""KV tiers: what reading pages back saves, what keeping them costs, and what kills of the only worker cost.

    python -m tools.performance.kv_tiers (--shape 135m | --model DIR) [--prompts 1024 2048 ...] [--rounds N]
        [--kills N] [--clients N] [--context N] [--answer N] [--threads N]

First the time to the first token of a prompt that is computed, found on the device, and read back from host memory and
from disk (its files are in the page cache), then the tokens per second of prompts and of answers with tiers and
without, medians of interleaved rounds. With --kills, the engine then serves --clients streams of --context tokens in
one worker process without a tier, which is killed as often (`--rounds 0` measures that alone): the prompt tokens that
are computed again, the time to the next token, and whether every answer is as that of a worker that lived. Needs a
machine with nothing else running, and removes what it put into /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from engine.backends.base import BackendRequest
from engine.backends.common.kv_tiers import tier_roots
from engine.backends.torch.backend import TorchBackend
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tests.fakes.oracle import ignore_progress, never
from tools.synthetic_models import make_synthetic

TIERS: dict[str, dict[str, float]] = {"none": {}, "host": {"kv_host_gib": 4}, "disk": {"kv_disk_gib": 4}}


class Rig:
    """Backends of one model, with tiers and without; each keeps its own pages on the device."""

    def __init__(self, model: Path, folder: Path, given: argparse.Namespace) -> None:
        self._model, self._folder, self._given = model, folder, given
        self._salt = 0
        self.backends = {name: self._load(**wanted) for name, wanted in TIERS.items()} if given.rounds else {}

    def spec(self, **wanted: float) -> ModelSpec:
        """Return the spec with these tiers, or other fields."""
        fields = {
            "device": "cpu",
            "prefix_salt": b"measured",
            "kv_cache_tokens": max(2 * max(self._given.prompts), 32 * 512),
            "kv_dir": self._folder if "kv_disk_gib" in wanted else None,
        }
        return msgspec.structs.replace(ModelSpec(path=self._model, name=self._model.name), **{**fields, **wanted})

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that no earlier one shares a page with."""
        self._salt += 1
        return [self._salt % 250 + 5, *(5 + index * self._salt % 290 for index in range(1, tokens))]

    def first_token_s(self, name: str, prompt: list[int]) -> float:
        """Return the seconds to the first token of a prompt."""
        backend = self.backends[name]
        began_s = time.perf_counter()
        backend.submit(BackendRequest(id="r", prompt_ids=prompt, params=SamplingParams(temperature=0, max_tokens=1)))
        while not any(event.token_id is not None for event in backend.step()):
            pass
        took_s = time.perf_counter() - began_s
        backend.cancel("r")
        return took_s

    def forget(self, name: str) -> None:
        """Have the device's pages reused, so that only the tier has what was computed."""
        scheduler = self.backends[name]._scheduler
        assert scheduler is not None
        pages = scheduler.pool.allocate(scheduler.pool.num_pages)
        assert pages is not None
        scheduler.pool.release(pages)

    def rates(self, name: str, clients: int = 32, tokens: int = 64) -> tuple[float, float]:
        """Return prompt tokens per second of a prompt of 2,048, and output tokens per second of `clients` answers."""
        length = 2048
        prompt_s = self.first_token_s(name, self.prompt(length))
        backend = self.backends[name]
        params = SamplingParams(temperature=0, max_tokens=tokens + 64, ignore_eos=True)
        for number in range(clients):
            backend.submit(BackendRequest(id=str(number), prompt_ids=self.prompt(96), params=params))
        while backend.stats().prefilling or backend.stats().waiting:
            backend.step()
        began_s, count = time.perf_counter(), 0
        for _ in range(tokens):
            count += sum(event.token_id is not None for event in backend.step())
        took_s = time.perf_counter() - began_s
        for number in range(clients):
            backend.cancel(str(number))
        return length / prompt_s, count / took_s

    def _load(self, **wanted: float) -> TorchBackend:
        backend = TorchBackend()
        backend.load(
            self.spec(**wanted),
            max_prompts=32,
            step_tokens=512,
            page_tokens=16,
            report=ignore_progress,
            cancelled=never,
        )
        return backend


def measure_first_tokens(rig: Rig, given: argparse.Namespace) -> None:
    """Print a row of each length."""
    print("prompt    computed     device       host       disk")
    for tokens in given.prompts:
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(given.rounds):
            prompt = rig.prompt(tokens)
            took["computed"].append(rig.first_token_s("none", prompt))
            took["device"].append(rig.first_token_s("none", prompt))
            for name in ("host", "disk"):
                rig.first_token_s(name, prompt)
                rig.forget(name)
                time.sleep(0.5)  # what is written in the background
                took[name].append(rig.first_token_s(name, prompt))
        row = [f"{1e3 * statistics.median(took[name]):8.1f} ms" for name in ("computed", "device", "host", "disk")]
        print(f"{tokens:6} {' '.join(row)}", flush=True)


def measure_rates(rig: Rig, given: argparse.Namespace) -> None:
    """Print the cost of keeping pages."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(given.rounds):
        for name in TIERS:
            found[name].append(rig.rates(name))
    for name, rates in found.items():
        pairs = list(zip(rates, found["none"], strict=True))
        parts = [statistics.median(each[index] / base[index] for each, base in pairs) for index in (0, 1)]
        own = [statistics.median(each[index] for each in rates) for index in (0, 1)]
        print(f"{name}: {own[0]:,.0f} prompt tok/s ({parts[0]:.3f}), {own[1]:,.0f} tok/s ({parts[1]:.3f})", flush=True)


async def measure_kills(rig: Rig, given: argparse.Namespace) -> None:
    """Print what kills cost. The streams of a worker go on through all of them, each with the same answer again and
    again, which is compared with that of a worker that nothing happened to."""
    tokens = given.context + given.answer
    config = EngineConfig(max_prompts=given.clients, max_deaths=given.kills + 2, max_restart_backoff_s=0.5)
    engine = Engine(config)
    await engine.start()
    spec = rig.spec(kv_cache_tokens=(given.clients + 1) * (tokens + 64), deterministic=True)
    began_s = time.perf_counter()
    await engine.load(spec)
    print(f"loaded in {time.perf_counter() - began_s:.2f} s", flush=True)
    params = SamplingParams(temperature=0, max_tokens=given.answer, ignore_eos=True)
    requests = [GenerateRequest(prompt_ids=rig.prompt(given.context), params=params) for _ in range(given.clients)]
    expected = await asyncio.gather(*(_answer(engine, each, []) for each in requests))
    print(f"{len(requests)} contexts of {given.context:,} in {time.perf_counter() - began_s:.0f} s", flush=True)
    times: list[list[float]] = [[] for _ in requests]
    wrong: list[int] = []

    async def stream(number: int) -> None:
        while True:
            if await _answer(engine, requests[number], times[number]) != expected[number]:
                wrong.append(number)

    streams = [asyncio.create_task(stream(number)) for number in range(len(requests))]
    await _until(lambda: all(times))
    costs = [await _kill(engine, times) for _ in range(given.kills)]
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await engine.close(drain_s=0.0)
    firsts, gaps, computed = zip(*costs, strict=True)
    print(
        f"{len(costs)} kills: next token after {statistics.median(firsts):.2f} s (max {max(firsts):.2f}), of every "
        f"stream after {statistics.median(gaps):.2f} s (max {max(gaps):.2f}); prompt tokens computed again: max "
        f"{max(computed)} of {given.clients * given.context:,}; answers that differ: {len(wrong)}"
    )


async def _answer(engine: Engine, request: GenerateRequest, times: list[float]) -> list[int]:
    """Return the tokens of an answer; add when each delta of it arrived."""
    token_ids: list[int] = []
    async for delta in engine.submit(request):
        token_ids += delta.token_ids
        times.append(time.perf_counter())
    return token_ids


async def _kill(engine: Engine, times: Sequence[list[float]]) -> tuple[float, float, int]:
    """Kill the worker; return the seconds until a stream has its next token, until each has, and the prompt tokens that
    the next worker computed of requests that had begun."""
    worker = engine.publish().workers[0]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    killed_s = time.perf_counter()
    await _until(lambda: engine.publish().workers[0].restarts > worker.restarts)
    died_s = time.perf_counter()
    await _until(lambda: all(each[-1] > died_s for each in times))
    gaps = [next(at for at in each if at > died_s) - killed_s for each in times]
    await asyncio.sleep(1.5)  # for the next report of the worker
    stats = engine.publish().workers[0].stats
    new = stats.prefix_query_tokens - stats.prefix_hit_tokens
    return min(gaps), max(gaps), stats.prompt_tokens_computed - new


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():  # noqa: ASYNC110 - a worker process changes it
            await asyncio.sleep(0.01)


def main() -> None:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description="What KV tiers save and cost.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a model folder")
    which.add_argument("--shape", choices=("135m", "0.5b"))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each stream's prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each stream's answers, with --kills")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = set(tier_roots(ModelSpec(path=folder, name="", kv_host_gib=1))["host"].glob("*/"))
        model = given.model or make_synthetic(given.shape, folder / given.shape)
        rig = Rig(model, folder, given)
        root = tier_roots(rig.spec(kv_host_gib=1))["host"]
        try:
            if given.rounds:
                measure_first_tokens(rig, given)
                measure_rates(rig, given)
            for backend in rig.backends.values():
                backend.unload()
            if given.kills:
                asyncio.run(measure_kills(rig, given))
        finally:
            for tier in set(root.glob("*/")) - before:
                shutil.rmtree(tier, ignore_errors=True)


if __name__ == "__main__":
    main()
