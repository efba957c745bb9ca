"""An exhaustive grid of settings on this machine, then autotune on the same grid in a quarter of the grid's time.

    python -m tools.performance.autotune_grid grid FILE             # measures every setting, and keeps that in FILE
    python -m tools.performance.autotune_grid runs FILE --runs 10   # searches, judges, writes FILE-runs.json

About four minutes, and ten; exit status 0 where nine of ten runs, or as large a share, found a setting within 5% of the
best. What the runs found is measured again, next to the best of the grid, by turns within the same minutes: the grid's
own numbers are of another time, and the largest of many noisy ones is too large. The best is the fastest of the grid's
`LEADING` that keeps the SLO then, too; a setting is judged by the median of its rounds against the best's. A grid that
was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import msgspec

from console.bench.result import MachineInfo
from console.bench.run import this_machine
from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from console.tuning.autotune.record import Interval, Record, Sample
from console.tuning.autotune.rig import LiveRig, setting_of
from console.tuning.autotune.search import Search
from console.tuning.autotune.space import Knob, Setting, Space
from console.tuning.autotune.traffic import LoadGenerator, Mix
from console.tuning.autotune.tuner import Tuner
from engine.metrics.slo import Slo

WORKERS, PROMPTS, STEP_TOKENS = (1, 2), (2, 4, 8, 16, 32, 64), (64, 512)
START_PROMPTS = 4
SLO = Slo(ttft_s=0.25, itl_s=0.075)
"""Which bounds this grid on either side."""
WORKER_S = 6.0
GRID_WINDOW_S, WINDOW_S, SETTLED_S = 8.0, 1.25, 0.5
LEADING = 3
ROUNDS, ROUND_WINDOW_S = 5, 4.0
NEAR, OFTEN = 0.95, 0.9


class Measured(msgspec.Struct):
    """One setting of the grid."""

    setting: Setting
    tokens_per_s: float
    ttft_s: float | None
    itl_s: float | None

    def keeps(self, slo: Slo) -> bool:
        return (self.ttft_s or 0.0) <= (slo.ttft_s or 1e9) and (self.itl_s or 0.0) <= (slo.itl_s or 1e9)


class Grid(msgspec.Struct):
    """All of them, and the time that took."""

    seconds: float
    settings: list[Measured]


class Found(msgspec.Struct):
    """The result of a run and its time."""

    seed: int
    setting: Setting
    seconds: float
    windows: int


class Judged(msgspec.Struct):
    """A setting that was measured again. shares: of the best's tok/s, one for each round."""

    setting: Setting
    tokens_per_s: list[float]
    shares: list[float]
    ttft_s: float | None
    itl_s: float | None
    keeps: bool

    @property
    def share(self) -> float:
        return median(self.shares)

    @property
    def good(self) -> bool:
        return self.keeps and self.share >= NEAR


class Proof(msgspec.Struct):
    """All of it."""

    machine: MachineInfo
    slo: Slo
    grid_s: float
    best: Setting
    judged: list[Judged]
    runs: list[Found]
    good: int


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
        mix = Mix(source="", lengths=tuple((64 + 7 * number % 65, 32 + 5 * number % 33) for number in range(64)))
        ids = [each for each in range(now.model.vocab_size) if each not in now.tokenizer.special_ids]
        at = setting_of(now.spec, now.config)
        live = LiveRig(runtime.engine, now.name, LoadGenerator(runtime.engine, now.name, mix, slo, ids, seed=seed), at)
        start = msgspec.structs.replace(at, max_prompts=START_PROMPTS)
        await live.use(start)
        await live.measure(2.0, 1.0)  # warms caches and kernels
        yield live, space_from(start)
        await live.rest()
    finally:
        await runtime.close(drain_s=0)


async def measure_grid(file: Path, window_s: float) -> None:
    grid = _read(file)
    async with rig(Slo(), 0) as (live, space):
        measured = {each.setting for each in grid.settings}
        for setting in space.in_order(each for each in space.all() if each not in measured):
            began = time.monotonic()
            await live.use(setting)
            record = Record.of(setting, [await live.measure(window_s, SETTLED_S)], Slo())
            one = Measured(setting, record.tokens_per_s.value, _value(record.ttft_s), _value(record.itl_s))
            grid.settings.append(one)
            grid.seconds += time.monotonic() - began
            _write(file, grid)
            print(f"{_setting_text(setting)}: {one.tokens_per_s:7,.0f} tok/s, {_latencies(one)}", flush=True)
    print(f"{len(grid.settings)} settings in {grid.seconds:.0f} s")


async def prove(file: Path, slo: Slo, seeds: range) -> Proof:
    """Search as often as there are seeds, then judge what was found."""
    grid = _read(file)
    if not grid.settings:
        sys.exit(f"there is no grid in {file}; measure it first")
    leading = sorted((each for each in grid.settings if each.keeps(slo)), key=lambda each: -each.tokens_per_s)[:LEADING]
    print(f"the grid took {grid.seconds:.0f} s; it is led by")
    for each in leading:
        print(f"  {_setting_text(each.setting)}: {each.tokens_per_s:,.0f} tok/s, {_latencies(each)}", flush=True)
    async with rig(slo, seeds.start) as (live, space):
        runs = [await _search(live, space, slo, grid.seconds / 4, seed) for seed in seeds]
        candidates = list(dict.fromkeys([each.setting for each in leading] + [each.setting for each in runs]))
        samples = await _again(live, space, candidates)
    records = {setting: Record.of(setting, windows, slo) for setting, windows in samples.items()}
    keeping = [each.setting for each in leading if records[each.setting].verdict != "broken"]
    if not keeping:
        sys.exit("none of the settings that led the grid keeps the SLO now: the machine is not what it was")
    best = max(keeping, key=lambda each: records[each].tokens_per_s.value)
    judged = [_judged(records[each], samples[each], samples[best]) for each in candidates]
    good = {each.setting for each in judged if each.good}
    return Proof(
        machine=this_machine(),
        slo=slo,
        grid_s=grid.seconds,
        best=best,
        judged=judged,
        runs=runs,
        good=sum(each.setting in good for each in runs),
    )


async def _search(live: LiveRig, space: Space, slo: Slo, budget_s: float, seed: int) -> Found:
    search = Search(space, slo, budget_s=budget_s, window_s=WINDOW_S, settle_s=SETTLED_S, seed=seed)
    run = Tuner(search, live)
    found = await run.run(apply=False)
    assert found is not None, "nothing could be measured"
    one = Found(seed, found.setting, search.spent_s, run.windows)
    print(f"seed {seed}: {_setting_text(one.setting)} in {one.seconds:.0f} s, {one.windows} runs", flush=True)
    return one


async def _again(live: LiveRig, space: Space, settings: list[Setting]) -> dict[Setting, list[Sample]]:
    """Windows of these, by turns; each round begins where the last one ended, so that few workers come and go."""
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
    at = space.start
    for number in range(ROUNDS):
        print(f"judging {len(settings)} settings, round {number + 1} of {ROUNDS}", flush=True)
        for setting in space.in_order(settings, at):
            await live.use(setting)
            samples[setting].append(await live.measure(ROUND_WINDOW_S, SETTLED_S))
            at = setting
    return samples


def _judged(record: Record, own: list[Sample], best: list[Sample]) -> Judged:
    rates = [_rate(sample) for sample in own]
    shares = [rate / _rate(other) for rate, other in zip(rates, best, strict=True)]
    ttft, itl = _value(record.ttft_s), _value(record.itl_s)
    return Judged(record.setting, rates, shares, ttft, itl, record.verdict != "broken")


def verdict_text(proof: Proof) -> str:
    """The settings that were judged, and how often a run ended at a good one."""
    lines = ["", f"the best: {_setting_text(proof.best)}"]
    for each in proof.judged:
        found = sum(run.setting == each.setting for run in proof.runs)
        lines.append(
            f"{_setting_text(each.setting)}, found by {found}: {median(each.tokens_per_s):,.0f} tok/s, "
            f"{each.share:.1%} of the "
            f"best ({min(each.shares):.1%} to {max(each.shares):.1%}), {_latencies(each)}, "
            f"SLO {'kept' if each.keeps else 'broken'}: {'good' if each.good else 'NOT GOOD'}"
        )
    verdict = "HOLDS" if proves(proof) else "DOES NOT HOLD"
    lines.append(
        f"{proof.good} of {len(proof.runs)} runs found a setting within {1 - NEAR:.0%} of the best that keeps the SLO, "
        f"in max a quarter of the grid's {proof.grid_s:.0f} s: {verdict}"
    )
    return "\n".join(lines)


def proves(proof: Proof) -> bool:
    return proof.good >= OFTEN * len(proof.runs)


def _rate(sample: Sample) -> float:
    return sum(each.tokens for each in sample.slices) / sum(each.seconds for each in sample.slices)


def _value(interval: Interval | None) -> float | None:
    return None if interval is None else interval.value


def _latencies(of: Measured | Judged) -> str:
    ttft, itl = (f"{1000 * each:.0f} ms" if each is not None else "none" for each in (of.ttft_s, of.itl_s))
    return f"TTFT p95 {ttft}, ITL p95 {itl}"


def _read(file: Path) -> Grid:
    return msgspec.json.decode(file.read_bytes(), type=Grid) if file.exists() else Grid(0.0, [])


def _write(file: Path, grid: Grid) -> None:
    file.write_bytes(msgspec.json.encode(grid))


def _setting_text(setting: Setting) -> str:
    return f"{setting.workers} workers x {setting.max_prompts:2} prompts, {setting.step_tokens:3} step tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("grid", "runs"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--window", type=float, default=GRID_WINDOW_S, help="seconds of each setting of the grid")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--slo-itl", type=float, default=SLO.itl_s, help="seconds")
    parser.add_argument("--slo-ttft", type=float, default=SLO.ttft_s, help="seconds")
    given = parser.parse_args()
    if given.what == "grid":
        asyncio.run(measure_grid(given.file, given.window))
        return
    seeds = range(given.first_seed, given.first_seed + given.runs)
    proof = asyncio.run(prove(given.file, Slo(itl_s=given.slo_itl, ttft_s=given.slo_ttft), seeds))
    saved = given.file.with_name(f"{given.file.stem}-runs.json")
    saved.write_bytes(msgspec.json.format(msgspec.json.encode(proof)))
    print(f"{verdict_text(proof)}\nwritten to {saved}")
    sys.exit(0 if proves(proof) else 1)


if __name__ == "__main__":
    main()
