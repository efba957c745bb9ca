"""KV tiers: what reading pages back saves, what keeping them costs, and what swaps and kills of the worker cost.

    python -m tools.performance.kv_tiers (--shape 135m | --model DIR) [--prompts 1000 2000 ...] [--rounds N]
        [--swaps N] [--kills N] [--clients N] [--context N] [--answer N] [--threads N]

First the time to the first token of a prompt that is computed, found on the device, and read back from host memory and
from disk (its files are in the page cache), then the tokens per second of prompts and of answers with tiers and
without, medians of interleaved rounds (`--rounds 0` leaves these out).

With --swaps, an engine with one tier is asked each prompt when it is new, again, and once more after another model took
the model's place and the model came back, as often as given: medians of the times to the first token, the loads not
included, beside the time to read the same pages into the pages of an idle backend. Ends with 1 where an answer is
another one than the first, or a prompt was not found as far as it should be.

With --kills, the engine then serves --clients streams of --context tokens in one worker process without a tier, which
is killed as often: the prompt tokens that are computed again, the time to the next token, and whether every answer is
as that of a worker that lived. Needs a machine with nothing else running, and removes what it put into /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from engine.backends.base import BackendRequest, LoadedModel
from engine.backends.common.kv_tiers import tier_roots, tier_salt
from engine.backends.common.page_keys import PageHash
from engine.backends.torch.backend import TorchBackend
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tests.fakes.oracle import ignore_progress, never
from tests.fakes.tiny_models import make_tiny_model
from tools.synthetic_models import make_synthetic

TIERS: dict[str, dict[str, float]] = {"none": {}, "host": {"kv_host_gib": 4}, "disk": {"kv_disk_gib": 4}}
SWAP_ANSWER = 4
"""Tokens of an answer before and after a swap."""


class Rig:
    """Backends of one model, with tiers and without; each keeps its own pages on the device."""

    def __init__(self, model: Path, folder: Path, given: argparse.Namespace) -> None:
        self._model, self._folder, self._given = model, folder, given
        self._salt = 0
        self.backends = {name: self.load(**wanted) for name, wanted in TIERS.items()} if given.rounds else {}

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

    def load(self, **wanted: float) -> TorchBackend:
        """Return a backend with these tiers, or other fields of its spec."""
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


async def measure_swaps(rig: Rig, given: argparse.Namespace, other: ModelSpec) -> bool:
    """Print a row of each tier and length; return whether every answer and every hit was as it should be."""
    print("tier  prompt  recompute        warm     reading  after the swap  after / (warm + reading)")
    all_right = True
    for name in ("host", "disk"):
        spec = rig.spec(**TIERS[name], deterministic=True)
        engine, reader = Engine(EngineConfig(threads=given.threads)), rig.load(**TIERS[name], deterministic=True)
        await engine.start()
        try:
            model = await _load_alone(engine, spec)
            for tokens in given.prompts:
                row = f"{name:4} {tokens:7}"
                if tokens + SWAP_ANSWER > model.max_model_len:
                    print(f"{row} tokens do not fit into the context of {model.max_model_len}", flush=True)
                    continue
                swaps = [await _swap(engine, spec, other, reader, rig.prompt(tokens)) for _ in range(given.swaps)]
                times = [statistics.median(seconds) for seconds in zip(*(each.seconds for each in swaps), strict=True)]
                cold, warm, reading, after = (f"{1e3 * each:.1f} ms" for each in times)
                ratio = times[3] / (times[1] + times[2])
                print(f"{row} {cold:>10} {warm:>11} {reading:>11} {after:>15}  {ratio:.3f}", flush=True)
                for problem in filter(None, (each.problem for each in swaps)):
                    print(f"{row} {problem}", flush=True)
                    all_right = False
        finally:
            await engine.close(drain_s=0.0)
            reader.unload()
    return all_right


class Swap(NamedTuple):
    """One swap. seconds: to the first token of a new prompt, to that of a warm hit, to read its pages, and to the first
    token after the swap.  problem: with the answers or the hits; "" for none."""

    seconds: tuple[float, float, float, float]
    problem: str


class Asked(NamedTuple):
    """An answer. first_s: seconds to its first token.  cached_tokens: of its prompt that were found."""

    first_s: float
    token_ids: list[int]
    cached_tokens: int


async def _swap(engine: Engine, spec: ModelSpec, other: ModelSpec, reader: TorchBackend, prompt: list[int]) -> Swap:
    """Ask a new prompt twice, have `other` take the model's place and leave it again, and ask once more."""
    params = SamplingParams(temperature=0, max_tokens=SWAP_ANSWER, ignore_eos=True)
    request = GenerateRequest(prompt_ids=prompt, params=params)
    cold, warm = await _ask(engine, request), await _ask(engine, request)
    await _load_alone(engine, other)
    reading_s, read = _read(reader, spec, prompt, engine._admission._cache_scope(request))
    model = await _load_alone(engine, spec)
    after = await _ask(engine, request)
    whole = (len(prompt) - 1) // model.page_tokens * model.page_tokens  # the last token is always computed
    found, wanted = (cold.cached_tokens, warm.cached_tokens, read, after.cached_tokens), (0, whole, whole, whole)
    problem = ""
    if not cold.token_ids == warm.token_ids == after.token_ids:
        problem = f"has other answers: {cold.token_ids}, {warm.token_ids} and, after the swap, {after.token_ids}"
    elif found != wanted:
        problem = f"has found other tokens (new, warm, read, after the swap) than {wanted}: {found}"
    return Swap((cold.first_s, warm.first_s, reading_s, after.first_s), problem)


async def _load_alone(engine: Engine, spec: ModelSpec) -> LoadedModel:
    """Load a model in the place of another; return once the other's worker, which writes its last pages, is gone."""
    model = await engine.load(spec)
    await _until(lambda: [each.state for each in engine.publish().workers] == ["ready"])
    return model


async def _ask(engine: Engine, request: GenerateRequest) -> Asked:
    began_s, first_s = time.perf_counter(), 0.0
    token_ids: list[int] = []
    async for delta in engine.submit(request):
        first_s = first_s or time.perf_counter() - began_s
        token_ids += delta.token_ids
    return Asked(first_s, token_ids, delta.cached_tokens)


def _read(reader: TorchBackend, spec: ModelSpec, prompt: list[int], scope: str) -> tuple[float, int]:
    """Read a prompt's pages into those of an idle backend, in batches as a worker does; return the seconds, and the
    tokens that were read."""
    scheduler, tiers, salt = reader._scheduler, reader._tiers, tier_salt(spec)
    assert scheduler is not None and tiers is not None and salt is not None
    keys = PageHash(salt).chain(prompt[:-1], scheduler.pool.page_tokens, scope=scope)
    pages = scheduler.pool.allocate(len(keys))
    assert pages is not None
    began_s, count, read = time.perf_counter(), tiers.batch_pages, 0
    for start in range(0, len(keys), count):
        read += tiers.restore(keys[start : start + count], pages[start : start + count]) or 0
    took_s = time.perf_counter() - began_s
    scheduler.pool.release(pages)
    return took_s, read * scheduler.pool.page_tokens


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


def main() -> int:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description="What KV tiers save and cost.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a model folder")
    which.add_argument("--shape", choices=("135m", "0.5b"))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 2000, 4000, 8000, 16000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--swaps", type=int, default=0, help="swaps for each prompt and tier")
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
        all_right = True
        try:
            if given.rounds:
                measure_first_tokens(rig, given)
                measure_rates(rig, given)
            for backend in rig.backends.values():
                backend.unload()
            if given.swaps:
                small = make_tiny_model(folder / "other")
                other = ModelSpec(path=small, name="other", device="cpu", kv_cache_tokens=512)
                all_right = asyncio.run(measure_swaps(rig, given, other))
            if given.kills:
                asyncio.run(measure_kills(rig, given))
        finally:
            for tier in set(root.glob("*/")) - before:
                shutil.rmtree(tier, ignore_errors=True)
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
