"""Eight models on one simulated GPU of 24 GiB, and an hour of requests for them: what is loaded how often.

The engine, its placement and its eviction are the product's own; workers are played, on virtual time. Loads take 1.5 s
and a second for each 0.8 GiB of weights; a request takes four seconds. `pytest -s` on this file prints the table of
docs/performance.md.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec
import pytest

from engine.config import AdapterSpec, DeviceShare, EngineConfig, ModelSpec
from engine.devices.simulated import simulated_readings
from engine.engine import Engine, LoadOrder
from engine.models import eviction
from engine.models.deployment import Deployment
from engine.models.eviction import Candidate
from engine.models.residency import Residency
from engine.snapshot import DeviceReading
from engine.worker_process import protocol
from tests.fakes.engines import ask, read
from tests.fakes.model import write_fake_model
from tests.fakes.scripted_workers import Machine, ScriptedHost
from tests.fakes.virtual_time import VirtualLoop, run

LAYERS = (3, 6, 9, 12, 15, 20, 27, 34)
"""Of the eight models: 1.2 to 13.8 GiB of weights."""

HOUR_S = 3600.0
REQUESTS = int(os.environ.get("EVICTION_REQUESTS", "300"))
HOURS = int(os.environ.get("EVICTION_HOURS", "2"))
_HOST_BYTES = 256 * 2**30


class Gpu(Machine):
    """A simulated GPU of 24 GiB in a machine with much RAM. loaded_s: what all loads took.  overcommitted: times that
    workers had more memory than there is."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, room=8)
        self.step_s = 1.0
        self.loaded_s = 0.0
        self.loads = 0
        self.overcommitted = 0

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        [cpu] = self.readings
        host = msgspec.structs.replace(cpu, total_bytes=_HOST_BYTES, free_bytes=_HOST_BYTES)
        return [*simulated_readings((24,)), host]

    def new_host(self, worker_id: str, spec: ModelSpec) -> ScriptedHost:
        host = GpuHost(self, worker_id, spec)
        self.hosts.append(host)
        used = sum(share.total_bytes for each in self.alive for share in each.spec.shares)
        self.overcommitted += used + sum(share.total_bytes for share in spec.shares) > 24 * 2**30
        return host


class GpuHost(ScriptedHost):
    """A worker whose load takes as long as its weights are large, and which has what placement gave it."""

    def __init__(self, machine: Gpu, worker_id: str, spec: ModelSpec) -> None:
        super().__init__(machine, worker_id, spec)
        self.gpu = machine

    def _progress(self, adapters: Sequence[AdapterSpec]) -> None:
        seconds = load_seconds(self.spec.shares)
        self.gpu.loaded_s += seconds
        self.gpu.loads += 1
        asyncio.get_running_loop().call_later(seconds, self._if_alive, self._load, adapters)

    def send(self, command: protocol.Command) -> None:
        if isinstance(command, protocol.Load):
            self.spec = command.spec
        super().send(command)


def load_seconds(shares: Sequence[DeviceShare]) -> float:
    return 1.5 + sum(share.weights_bytes for share in shares) / (0.8 * 2**30)


@dataclass(frozen=True)
class Arrival:
    at: float
    model: str


def hour(seed: int, requests: int) -> list[Arrival]:
    """Requests of an hour, at random; models by Zipf's law, in an order of their own."""
    random = Random(seed)
    names = [f"m{layers}" for layers in LAYERS]
    random.shuffle(names)
    weights = [1 / (rank + 1) for rank in range(len(names))]
    gaps = [random.expovariate(requests / HOUR_S) for _ in range(requests)]
    return [Arrival(at, random.choices(names, weights)[0]) for at in accumulate(gaps)]


def write_models(folder: Path) -> dict[str, ModelSpec]:
    specs = {}
    for layers in LAYERS:
        path = write_fake_model(folder / f"m{layers}")
        config = json.loads((path / "config.json").read_text())
        config |= {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": layers,
            "torch_dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(config))
        specs[path.name] = ModelSpec(path=path, name=path.name, kv_cache_tokens=4096)
    return specs


@dataclass(frozen=True)
class Result:
    loads: int
    loaded_s: float
    mean_wait_s: float
    failed: int
    overcommitted: int
    sizes: dict[str, int]
    load_s: dict[str, float]


def replay(specs: dict[str, ModelSpec], arrivals: Sequence[Arrival]) -> Result:
    """Send the requests of an hour to an engine."""
    random = Random(0)

    async def find(name: str) -> LoadOrder:
        return LoadOrder(spec=specs[name])

    async def main(loop: VirtualLoop) -> Result:
        gpu = Gpu(random)
        config = EngineConfig(worker_host="thread", hang_s=0.0)
        engine = Engine(config, new_host=gpu.new_host, probe=gpu)
        engine._publisher.publish_s = 60.0  # nobody looks
        await engine.start()
        waits, failed = list[float](), 0
        sizes, load_s = dict[str, int](), dict[str, float]()

        async def client(arrival: Arrival) -> None:
            nonlocal failed
            await asyncio.sleep(arrival.at)
            began = loop.time()
            serving = await engine.serving(arrival.model, find)
            waits.append(loop.time() - began)
            shares = next(each.spec.shares for each in gpu.alive if each.spec.name == arrival.model)
            sizes[arrival.model] = sum(share.total_bytes for share in shares)
            load_s[arrival.model] = load_seconds(shares)
            request = msgspec.structs.replace(ask("x", max_tokens=4), model=arrival.model, key=serving.key)
            answer = await read(engine.submit(request), patience_s=1e5)
            failed += answer.last.finish != "length"

        await asyncio.gather(*map(client, arrivals))
        engine.check()
        await engine.close(0.0)
        assert gpu.wrongs == []
        return Result(gpu.loads, gpu.loaded_s, sum(waits) / len(waits), failed, gpu.overcommitted, sizes, load_s)

    return run(main, random)


def offline_optimum_s(arrivals: Sequence[Arrival], sizes: dict[str, int], load_s: dict[str, float]) -> float:
    """Least seconds of loads of who knows the hour and answers requests in their order: dynamic programming over the
    sets of models in memory."""
    names = sorted(sizes)
    room = 24 * 2**30 - 24 * 2**30 // 100
    bytes_of = [sum(sizes[name] for i, name in enumerate(names) if kept >> i & 1) for kept in range(2 ** len(names))]
    best = {0: 0.0}
    for arrival in arrivals:
        index = names.index(arrival.model)
        after: dict[int, float] = {}
        for kept, cost in best.items():
            if kept >> index & 1:
                after[kept] = min(cost, after.get(kept, cost))
                continue
            cost += load_s[arrival.model]
            subset = kept
            while True:
                if bytes_of[subset] + sizes[arrival.model] <= room:
                    now = subset | 1 << index
                    after[now] = min(cost, after.get(now, cost))
                if not subset:
                    break
                subset = (subset - 1) & kept
        best = after
    return min(best.values())


def by_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least recently used instead: as many as it takes, and at once."""

    def candidate(model: Deployment, now: float) -> Candidate:
        return Candidate(key=model.key, load_s=-model.model_queue.last_used, demand=1.0, size_bytes=1)

    def choose(
        candidates: Sequence[Candidate], fits: Callable[[Collection[str]], bool]
    ) -> tuple[Candidate, ...] | None:
        oldest = sorted(candidates, key=lambda each: -each.load_s)
        counts = range(len(oldest) + 1)
        return next((tuple(oldest[:count]) for count in counts if fits([each.key for each in oldest[:count]])), None)

    monkeypatch.setattr(eviction, "_candidate", candidate)
    monkeypatch.setattr(Residency, "protected_s", lambda self, now: 0.0)
    monkeypatch.setattr(eviction, "choose_victims", choose)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_hour_of_requests_is_answered_with_loads_within_a_tenth_of_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, arrivals = write_models(tmp_path), [hour(seed, REQUESTS) for seed in range(HOURS)]
    ours = [replay(specs, each) for each in arrivals]
    by_last_use(monkeypatch)
    lru = [replay(specs, each) for each in arrivals]
    best = [offline_optimum_s(each, result.sizes, result.load_s) for each, result in zip(arrivals, ours, strict=True)]
    for name, results in (("ours", ours), ("LRU", lru)):
        seconds = sum(each.loaded_s for each in results)
        print(
            f"\n{REQUESTS} requests an hour, {name}: {sum(each.loads for each in results) / HOURS:.0f} loads, "
            f"{seconds / HOURS:.0f} s ({seconds / sum(best):.2f} of the optimum, {sum(best) / HOURS:.0f} s), mean wait "
            f"{sum(each.mean_wait_s for each in results) / HOURS:.1f} s",
            end="",
        )
        assert [(each.failed, each.overcommitted) for each in results] == [(0, 0)] * HOURS
    assert sum(each.loaded_s for each in ours) <= 1.1 * sum(best)
    assert sum(each.loaded_s for each in ours) < sum(each.loaded_s for each in lru)
