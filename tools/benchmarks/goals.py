"""Promises of this engine that are no race: prefill against the machine's products of matrices, prefixes, loading.

`python -m tools.benchmarks.goals DIR ROUNDS` prints the shares of every round as JSON.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.config import SamplingParams
from engine.devices.measure import product_flops_per_s
from engine.engine import Engine, GenerateRequest
from tools.benchmarks.engine_process import EngineFailed
from tools.benchmarks.engines import ROWS
from tools.benchmarks.limits import linear_flops
from tools.benchmarks.machine import usable_cores
from tools.benchmarks.places import ROOT, Places, environment, last_words
from tools.benchmarks.protocol import FIRST_ID, VOCABULARY, Given
from tools.benchmarks.results import Goal, Spread
from tools.benchmarks.runners.ours import started

PREFILL_TOKENS, PREFIX_TOKENS, TAIL_TOKENS = 2048, 1024, 16
_PRODUCT_SIDE = 2048


@dataclass(frozen=True)
class _Promise:
    title: str
    bound: float
    at_most: bool


PROMISES = {
    "prefill": _Promise(
        f"prefill of one prompt of {PREFILL_TOKENS} tokens: arithmetic of the linear layers, of what products of "
        f"{_PRODUCT_SIDE}x{_PRODUCT_SIDE} reach, in bf16 or float32, whichever is faster here",
        0.7,
        at_most=False,
    ),
    "prefix": _Promise(
        f"TTFT of a second request with the same {PREFIX_TOKENS} tokens first, of the first one's", 0.1, at_most=True
    ),
    "load": _Promise(
        "loading, of a process that imports torch, reads the files and packs every matrix once", 1.5, at_most=True
    ),
}


def measured(shape: str, places: Places, rounds: int) -> list[Goal]:
    """Each promise over some rounds, in a process of its own. Raises EngineFailed."""
    model = places.model(shape, ROWS[0])
    command = [sys.executable, "-m", "tools.benchmarks.goals", str(model), shape, str(rounds)]
    with places.log(shape, "goals").open("wb") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment({}), check=False)
    if done.returncode:
        raise EngineFailed(f"prefill, prefix and load: {last_words(places.log(shape, 'goals'))}")
    shares = msgspec.json.decode(done.stdout, type=dict[str, list[float]])
    return [
        Goal(shape, promise.title, Spread.of(shares[key]), promise.bound, promise.at_most)
        for key, promise in PROMISES.items()
    ]


async def _shares(model: Path, shape: str, round_: int) -> dict[str, float]:
    threads = usable_cores()
    packing_s = _packing_s(model, threads)
    began_s = time.perf_counter()
    engine, _ = await started(Given(model, 1, 2 * PREFILL_TOKENS, threads))
    loading_s = time.perf_counter() - began_s
    try:
        drawn = random.Random(round_)
        await _ttft_s(engine, _ids(drawn, PREFILL_TOKENS))  # warms up
        flops_per_s = max(product_flops_per_s(dtype, _PRODUCT_SIDE) for dtype in (torch.bfloat16, torch.float32))
        prefill_s = await _ttft_s(engine, _ids(drawn, PREFILL_TOKENS))
        prefix = _ids(drawn, PREFIX_TOKENS)
        first_s = await _ttft_s(engine, prefix + _ids(drawn, TAIL_TOKENS))
        second_s = await _ttft_s(engine, prefix + _ids(drawn, TAIL_TOKENS))
    finally:
        await engine.close(drain_s=0)
    return {
        "prefill": linear_flops(shape, PREFILL_TOKENS) / flops_per_s / prefill_s,
        "prefix": second_s / first_s,
        "load": loading_s / packing_s,
    }


def _packing_s(model: Path, threads: int) -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tools.benchmarks.pack", str(model), str(threads)], cwd=ROOT, check=True)
    return time.perf_counter() - began_s


async def _ttft_s(engine: Engine, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began_s = time.perf_counter()
    async for _ in engine.submit(GenerateRequest(prompt_ids=prompt, params=params)):
        break
    return time.perf_counter() - began_s


def _ids(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(FIRST_ID, VOCABULARY) for _ in range(count)]


def _main(model: Path, shape: str, rounds: int) -> None:
    torch.set_num_threads(usable_cores())
    shares = [asyncio.run(_shares(model, shape, round_)) for round_ in range(rounds)]
    by_name = {name: [share[name] for share in shares] for name in PROMISES}
    sys.stdout.buffer.write(msgspec.json.encode(by_name))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
