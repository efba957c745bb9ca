"""How near to the best setting autotune ends on simulated devices, in what time and in how many windows.

    python -m tools.performance.autotune_simulated [SEEDS]        # 24 by default, a few minutes

Time is added up, none passes. Five groups: the devices of tests/fakes/simulated_tuning.py as they are, with twice the
noise, with a tenth of the grid's time, with other costs and SLOs, and with minutes and windows as the command has them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median

from console.tuning.autotune.search import WINDOW_S, Search
from engine.metrics.slo import Slo
from tests.fakes.simulated_tuning import DEVICES, PROMPTS, Device, Noise, knobs

NEAR = 0.95
TOLERANCE = 0.02
"""By how much a latency may be longer than the SLO allows: less than what a measurement can distinguish."""
SPREAD = 0.5
"""Of the logarithms of costs and SLOs."""
LARGE = Device(
    "every knob of a GPU",
    Slo(itl_s=0.06, ttft_s=1.0),
    knobs(
        workers=(1, 2, 3, 4),
        max_prompts=PROMPTS,
        cache_bits=(8, 16),
        draft_tokens=(0, 2, 4, 7),
        step_tokens=(64, 128, 256, 512, 1024, 2048),
    ),
    memory=260,
    quantised_s=0.00006,
    accepted=0.6,
)


@dataclass(frozen=True)
class Case:
    device: Device
    budget_s: float
    window_s: float = WINDOW_S


@dataclass(frozen=True)
class Result:
    """share: of the best's tokens/s, 0 where the SLO is broken."""

    share: float
    windows: int
    spent: float


def groups() -> Iterator[tuple[str, list[Case]]]:
    yield "as they are", [Case(each, each.grid_s() / 4) for each in DEVICES]
    noisy = [replace(each, noise=2 * each.noise, window_noise=0.04) for each in DEVICES]
    yield "twice the noise", [Case(each, each.grid_s() / 4) for each in noisy]
    yield "a tenth of the grid's time", [Case(each, each.grid_s() / 10) for each in DEVICES]
    others = [varied(each, seed) for each in DEVICES for seed in range(5)]
    yield "other costs and SLOs", [Case(each, each.grid_s() / 4) for each in others if keepable(each)]
    minutes = [(each, budget_s) for each in (LARGE, DEVICES[2], DEVICES[3]) for budget_s in (120.0, 300.0, 600.0)]
    yield "2, 5 and 10 minutes", [Case(each, time, min(6.0, max(2.0, time / 100))) for each, time in minutes]


def varied(device: Device, seed: int) -> Device:
    draw = random.Random(f"{device.name} {seed}")

    def other(value: float) -> float:
        return value * draw.lognormvariate(0, SPREAD)

    slo = device.slo
    return replace(
        device,
        fixed_s=other(device.fixed_s),
        weights_s=other(device.weights_s),
        row_s=other(device.row_s),
        prompt_s=other(device.prompt_s),
        kv_s=other(device.kv_s),
        memory=device.memory * draw.uniform(0.6, 1.8),
        slo=Slo(
            ttft_s=other(slo.ttft_s) if slo.ttft_s is not None else None,
            itl_s=other(slo.itl_s) if slo.itl_s is not None else None,
        ),
    )


def keepable(device: Device) -> bool:
    """Return whether any setting keeps the SLO."""
    return any(device.fits(each) and device.truth(each).keeps(device.slo) for each in device.space.all())


def searched(case: Case, seed: int) -> Result:
    device, noise, windows = case.device, Noise(seed), 0
    search = Search(device.space, device.slo, budget_s=case.budget_s, window_s=case.window_s, seed=seed)
    while (trial := search.propose()) is not None:
        if device.fits(trial.setting):
            search.observe(trial, noise.window(device, trial.setting, trial.seconds))
            windows += 1
        else:
            search.refuse(trial)
    best = search.best()
    truth = device.truth(best.setting if best is not None else device.start)
    share = truth.tokens_per_s / device.best().tokens_per_s if truth.keeps(device.slo, TOLERANCE) else 0.0
    return Result(share, windows, search.spent_s / case.budget_s)


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(f"{'':28}{'runs':>6}{'median':>8}{'worst':>8}{'within 5%':>11}{'SLO broken':>12}{'windows':>9}{'of time':>9}")
    for name, cases in groups():
        found = [searched(case, seed) for case in cases for seed in range(seeds)]
        shares = [each.share for each in found]
        worst = min((each for each in shares if each), default=math.nan)
        print(
            f"{name:28}{len(found):6}{median(shares):8.3f}{worst:8.3f}{fmean(each >= NEAR for each in shares):11.1%}"
            f"{fmean(each == 0 for each in shares):12.1%}{fmean(each.windows for each in found):9.0f}"
            f"{fmean(each.spent for each in found):9.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
