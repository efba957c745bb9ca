"""An exhaustive grid of settings on this machine, then autotune on the same grid in a quarter of the grid's time.

    python -m tests.performance.autotune_grid grid  FILE            # measures every setting, and keeps that in FILE
    python -m tests.performance.autotune_grid runs  FILE --runs 4   # searches, and says how FILE has what was found

What autotune found is judged by what the grid measured of that setting, against the best of the grid that keeps the
SLO. A grid that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from console.autotune.load import Load
from console.autotune.mix import Mix
from console.autotune.record import Record, Slo
from console.autotune.rig import LiveRig, setting_of
from console.autotune.search import SETTLE_S, Search
from console.autotune.space import Knob, Setting, Space
from console.autotune.tuner import Tuner
from console.runtime import Runtime
from console.settings import Settings

WORKERS, PROMPTS, STEP_TOKENS = (1, 2), (2, 8, 32), (64, 512)
WORKER_S = 3.0
WINDOW_S = 1.5


class Measured(msgspec.Struct):
    """One setting of the grid."""

    setting: Setting
    tokens_per_s: float
    ttft_s: float
    itl_s: float

    def keeps(self, slo: Slo) -> bool:
        return self.ttft_s <= (slo.ttft_s or 1e9) and self.itl_s <= (slo.itl_s or 1e9)


class Grid(msgspec.Struct):
    """All of them, and the time that took."""

    seconds: float
    settings: list[Measured]


def space_from(start: Setting) -> Space:
    knobs = (
        Knob(name="workers", values=WORKERS, turn_s=WORKER_S),
        Knob(name="max_prompts", values=PROMPTS),
        Knob(name="step_tokens", values=STEP_TOKENS),
    )
    return Space(knobs=knobs, start=start)


@asynccontextmanager
async def rig(slo: Slo, seed: int) -> AsyncIterator[tuple[LiveRig, Space]]:
    """The demo on an engine of its own, with KV pages for the longest line of prompts."""
    runtime = Runtime(Settings(api=False, timeout=0, max_prompts=max(PROMPTS)))
    await runtime.start()
    try:
        await runtime.load("demo")
        now = await runtime.engine.serving()
        mix = Mix(said="", lengths=tuple((64 + 7 * number % 65, 32 + 5 * number % 33) for number in range(64)))
        ids = [each for each in range(now.model.vocab_size) if each not in now.tokenizer.special_ids]
        at = setting_of(now.spec, now.config)
        live = LiveRig(runtime.engine, now.name, Load(runtime.engine, now.name, mix, slo, ids, seed=seed), at)
        start = msgspec.structs.replace(at, max_prompts=PROMPTS[1])
        await live.use(start)
        await live.measure(2.0, 1.0)  # warms caches and kernels
        yield live, space_from(start)
        await live.rest()
    finally:
        await runtime.close(drain_s=0)


async def measure_grid(file: Path, window_s: float) -> None:
    grid = _read(file)
    async with rig(Slo(), 0) as (live, space):
        known = {each.setting for each in grid.settings}
        for setting in space.in_order([each for each in space.all() if each not in known]):
            began = time.monotonic()
            await live.use(setting)
            record = Record.of(setting, [await live.measure(window_s, SETTLE_S)], Slo())
            assert record.ttft_s is not None and record.itl_s is not None
            one = Measured(setting, record.tokens_per_s.value, record.ttft_s.value, record.itl_s.value)
            grid.settings.append(one)
            grid.seconds += time.monotonic() - began
            _write(file, grid)
            print(
                f"{_said(setting)}: {one.tokens_per_s:7.0f} tok/s, TTFT {one.ttft_s:.3f} s, ITL {one.itl_s:.4f} s",
                flush=True,
            )
    print(f"{len(grid.settings)} settings in {grid.seconds:.0f} s")


async def search(file: Path, slo: Slo, seeds: range) -> None:
    grid = _read(file)
    best = max((each for each in grid.settings if each.keeps(slo)), key=lambda each: each.tokens_per_s)
    known = {each.setting: each for each in grid.settings}
    print(f"best of the grid: {_said(best.setting)}, {best.tokens_per_s:.0f} tok/s; it took {grid.seconds:.0f} s")
    for seed in seeds:
        async with rig(slo, seed) as (live, space):
            run = Tuner(Search(space, slo, budget_s=grid.seconds / 4, window_s=WINDOW_S, settle_s=0.5, seed=seed), live)
            found = await run.run(apply=False)
        assert found is not None
        there = known[found.setting]
        share = there.tokens_per_s / best.tokens_per_s
        verdict = "as good" if share >= 0.95 and there.keeps(slo) else "NOT AS GOOD"
        print(
            f"seed {seed}: {_said(found.setting)} in {run.search.spent_s:.0f} s, {run.windows} windows: "
            f"{share:.1%} of the best, SLO {'kept' if there.keeps(slo) else 'broken'} by the grid's numbers: {verdict}",
            flush=True,
        )


def _read(file: Path) -> Grid:
    return msgspec.json.decode(file.read_bytes(), type=Grid) if file.exists() else Grid(0.0, [])


def _write(file: Path, grid: Grid) -> None:
    file.write_bytes(msgspec.json.encode(grid))


def _said(setting: Setting) -> str:
    return f"{setting.workers} workers x {setting.max_prompts:2} prompts, {setting.step_tokens:3} step tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("grid", "runs"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--window", type=float, default=9.0, help="seconds of each setting of the grid")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--slo-itl", type=float, default=None, help="seconds")
    parser.add_argument("--slo-ttft", type=float, default=None, help="seconds")
    given = parser.parse_args()
    if given.what == "grid":
        asyncio.run(measure_grid(given.file, given.window))
    else:
        seeds = range(given.first_seed, given.first_seed + given.runs)
        asyncio.run(search(given.file, Slo(itl_s=given.slo_itl, ttft_s=given.slo_ttft), seeds))


if __name__ == "__main__":
    main()
