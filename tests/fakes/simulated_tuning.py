"""Simulated devices that are tuned: what a setting gives is a function of its knobs, a measurement of that is noisy.

`Device.truth` is the cost model, `Noise.window` draws a window of it. Time is added up: a search of an hour takes none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from console.tuning.autotune.record import Sample, Slice
from console.tuning.autotune.search import SETTLE_S, Search
from console.tuning.autotune.space import Knob, Setting, Space
from engine.metrics.slo import Slo

FULL_WINDOW_S = 20.0
"""What a measurement of the exhaustive grid takes."""
WORKER_S, LOAD_S = 5.0, 15.0
GAPS = 40
IN_USE = Setting()


@dataclass(frozen=True)
class Truth:
    """What a setting really gives: output tokens/s, and the p95 of TTFT and ITL."""

    tokens_per_s: float
    ttft_s: float
    itl_s: float

    def keeps(self, slo: Slo, tolerance: float = 0.0) -> bool:
        """tolerance: how much more latency counts as no more, since no measurement could tell."""
        more = 1 + tolerance
        return self.ttft_s <= (slo.ttft_s or math.inf) * more and self.itl_s <= (slo.itl_s or math.inf) * more


@dataclass(frozen=True)
class Device:
    """Times of a step: `fixed_s`, `weights_s` to read the weights once, `row_s` per sequence, `prompt_s` per prompt
    token, `kv_s` per sequence for its 16-bit KV pages.

    cores: that the workers share; `alone` of the step's work cannot be spread over threads.  memory: places' worth of
    16-bit KV pages there is memory for, weights per worker being worth `weights_places`.
    quantised_s: per sequence and step for less than 16 bits.  accepted: the share of guesses that hold.
    noise: of a slice of a second, and of a window as a whole.
    """

    name: str
    slo: Slo
    knobs: tuple[Knob, ...]
    start: Setting = IN_USE
    fixed_s: float = 0.004
    weights_s: float = 0.010
    row_s: float = 0.0003
    prompt_s: float = 0.00004
    kv_s: float = 0.0001
    quantised_s: float = 0.0
    cores: int = 1
    alone: float = 0.3
    memory: float = math.inf
    weights_places: float = 16.0
    accepted: float = 0.0
    prompt_tokens: int = 256
    output_tokens: int = 128
    noise: float = 0.06
    window_noise: float = 0.015

    @property
    def space(self) -> Space:
        return Space(knobs=self.knobs, start=self.start)

    def fits(self, setting: Setting) -> bool:
        held = setting.workers * (self.weights_places + setting.max_prompts * setting.cache_bits / 16)
        return held <= self.memory

    def truth(self, setting: Setting) -> Truth:
        """In the steady state of as many clients as there are places."""
        rows, guesses = setting.max_prompts, setting.draft_tokens
        threads = setting.threads or max(1, self.cores // setting.workers)
        busy = setting.workers * threads / self.cores
        slowed = (self.alone + (1 - self.alone) / threads) * (1 if busy <= 1 else busy**1.7)
        held = sum(self.accepted**ahead for ahead in range(1, guesses + 1))
        sharing = 1 + 0.12 * (setting.workers - 1)
        kv = self.kv_s * setting.cache_bits / 16 + (self.quantised_s if setting.cache_bits < 16 else 0.0)
        answer = self.fixed_s + slowed * sharing * (
            self.weights_s + rows * kv + rows * self.row_s * (1 + guesses) * (1 + (rows * (1 + guesses) / 96) ** 2 / 4)
        )
        a_token = slowed * sharing * self.prompt_s
        chunk = min(setting.step_tokens, self.prompt_tokens)
        prompts_per_step = rows * (1 + held) / self.output_tokens
        prompt_tokens_per_step = prompts_per_step * self.prompt_tokens
        step = answer + prompt_tokens_per_step * a_token
        starved = max(1.0, prompt_tokens_per_step / max(1, setting.step_tokens - rows))
        tokens_per_s = setting.workers * rows * (1 + held) / (step * starved)
        chunks = math.ceil(self.prompt_tokens / max(1, setting.step_tokens - rows))
        longest = answer + min(setting.step_tokens, max(chunk, 2 * prompt_tokens_per_step)) * a_token
        return Truth(tokens_per_s, chunks * starved * (answer + chunk * a_token) * 1.3, longest)

    def best(self) -> Truth:
        """What a grid that tries every setting, and measures without noise, finds."""
        kept = [truth for each in self.space.all() if self.fits(each) and (truth := self.truth(each)).keeps(self.slo)]
        return max(kept, key=lambda truth: truth.tokens_per_s)

    def grid_s(self) -> float:
        """Time of the exhaustive grid, with the dear knobs turned as seldom as can be."""
        now, total = self.start, 0.0
        for setting in self.space.in_order([each for each in self.space.all() if self.fits(each)]):
            total += self.space.turn_s(now, setting) + SETTLE_S + FULL_WINDOW_S
            now = setting
        return total


@dataclass
class Noise:
    """Draws windows of a device; the same seed draws the same."""

    seed: int
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def window(self, device: Device, setting: Setting, seconds: float) -> Sample:
        truth = device.truth(setting)
        whole = self.draw.lognormvariate(0, device.window_noise)
        return Sample(slices=tuple(self._slice(device, truth, whole) for _ in range(round(seconds))))

    def _slice(self, device: Device, truth: Truth, whole: float) -> Slice:
        faster = whole * self.draw.lognormvariate(0, device.noise)
        calmer = whole * self.draw.lognormvariate(0, device.noise / 3)
        tokens = round(truth.tokens_per_s * faster)
        requests = max(1, round(tokens / device.output_tokens))
        return Slice(
            seconds=1.0,
            tokens=tokens,
            ttft_s=self._spread(truth.ttft_s / calmer, min(requests, GAPS)),
            itl_s=self._spread(truth.itl_s / calmer, GAPS),
            judged=requests,
            met_slo=requests if truth.keeps(device.slo) else requests // 2,
        )

    def _spread(self, p95: float, count: int) -> list[float]:
        """Values of which about a twentieth is longer than p95: an exponential's upper half, so to say."""
        return [p95 * (0.5 + 0.5 * -math.log(1 - self.draw.random()) / 3) for _ in range(count)]


def run(device: Device, seed: int, budget_s: float) -> tuple[Search, Setting]:
    """Search a device to the end; the setting found."""
    search = Search(device.space, device.slo, budget_s=budget_s, seed=seed)
    noise = Noise(seed)
    while (trial := search.propose()) is not None:
        if device.fits(trial.setting):
            search.observe(trial, noise.window(device, trial.setting, trial.seconds))
        else:
            search.refuse(trial)
    found = search.best()
    assert found is not None
    return search, found.setting


def knobs(**values: Iterable[int]) -> tuple[Knob, ...]:
    """Knobs by their names, each with what it takes to turn it."""
    turn_s = {"workers": WORKER_S, "cache_bits": LOAD_S, "draft_tokens": LOAD_S}
    return tuple(
        Knob(name=name, values=tuple(found), turn_s=turn_s.get(name, 0.0))  # type: ignore[arg-type]
        for name, found in values.items()
    )


PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = (64, 128, 256, 512, 1024)

DEVICES = (
    Device(
        "one GPU, held to its ITL",
        Slo(itl_s=0.045, ttft_s=1.0),
        knobs(workers=(1, 2, 3, 4), max_prompts=PROMPTS, step_tokens=CHUNKS),
        memory=220,
    ),
    Device(
        "a GPU with little memory, where fewer bits make room",
        Slo(itl_s=0.08, ttft_s=1.0),
        knobs(workers=(1, 2), max_prompts=PROMPTS, cache_bits=(4, 8, 16), step_tokens=(128, 256, 512)),
        memory=56,
        quantised_s=0.00006,
    ),
    Device(
        "a CPU, whose cores the workers share",
        Slo(itl_s=0.25, ttft_s=4.0),
        knobs(workers=(1, 2, 4, 8), max_prompts=(1, 2, 4, 8, 16, 32), threads=(1, 2, 4, 8, 16)),
        start=Setting(threads=4),
        cores=16,
        fixed_s=0.006,
        weights_s=0.08,
        row_s=0.01,
        prompt_s=0.002,
        kv_s=0.001,
        noise=0.08,
    ),
    Device(
        "guesses that hold, of use to few requests alone",
        Slo(itl_s=0.033),
        knobs(max_prompts=PROMPTS, draft_tokens=(0, 1, 2, 4, 7), cache_bits=(8, 16), step_tokens=CHUNKS),
        accepted=0.75,
    ),
    Device(
        "first tokens in a hurry",
        Slo(ttft_s=0.135, itl_s=0.08),
        knobs(workers=(1, 2, 3, 4), max_prompts=PROMPTS, step_tokens=CHUNKS),
        memory=300,
        prompt_tokens=600,
        prompt_s=0.00008,
    ),
    Device(
        "no SLO, a small grid",
        Slo(),
        knobs(workers=(1, 2), max_prompts=(2, 4, 8, 16, 32), step_tokens=(128, 512)),
        cores=2,
        alone=0.5,
        row_s=0.002,
    ),
)
