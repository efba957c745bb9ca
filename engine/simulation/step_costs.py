"""The cost of a worker's step in seconds, as a function of its work."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from engine.backends.scheduler.sequences import BatchPlan
from engine.errors import InvalidRequest

# A machine that others use too is faster now and slower then. How its speed went is measured with the steps, and
# played back: steps are slow in bursts, which noise of each step alone would even out within an answer.

DRIFT_STRETCH_S = 0.1
"""For as long the speed stays as it is."""


def measured_drift(costs: StepCosts, samples: Sequence[StepSample]) -> tuple[float, ...]:
    """How much slower than `costs` say the steps were, taken one after the other, in stretches of about STRETCH_S. So
    that the costs stay what they are in all, the harmonic mean is 1: a stretch does the less the slower it is."""
    found: list[float] = []
    took_s = predicted_s = 0.0
    for sample in samples:
        took_s += sample.seconds
        predicted_s += costs.seconds(sample.shape)
        if took_s >= DRIFT_STRETCH_S:
            found.append(took_s / predicted_s)
            took_s = predicted_s = 0.0
    mean = len(found) / sum(1 / each for each in found) if found else 1.0
    return tuple(each / mean for each in found)


class SpeedDrift:
    """The course of one worker, which begins somewhere else in it than that of others. Seconds are those simulated."""

    __slots__ = ("_factors", "_offset")

    def __init__(self, factors: Sequence[float], worker_id: str) -> None:
        self._factors = factors
        self._offset = zlib.crc32(worker_id.encode())

    def slower(self, now: float) -> float:
        """Return the factor of all prices now."""
        return self._factors[(int(now / DRIFT_STRETCH_S) + self._offset) % len(self._factors)] if self._factors else 1.0

    def left_s(self, now: float) -> float:
        """For how long."""
        return DRIFT_STRETCH_S - now % DRIFT_STRETCH_S if self._factors else math.inf


FEW_ROWS = 8
"""The first rows of a step, whose cost differs from that of the rows after them."""
FEW_TOKENS = 64
"""The same of prompt tokens."""


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a step.

    decodes: answers that it goes on with, each with one token.  context_tokens: tokens that those attend to, together.
    chunks: prompts that it works on.  prompt_tokens: tokens of those that it computes.  prompt_pairs: how many tokens
    each of those attends to, together.
    """

    decodes: int = 0
    context_tokens: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepShape:
        """Of the chunks of a step, each as its first position and its number of tokens."""
        decodes = context = prompts = prompt_tokens = 0
        pairs = 0.0
        for start, tokens in chunks:
            if tokens == 1:
                decodes += 1
                context += start + 1
            else:
                prompts += 1
                prompt_tokens += tokens
                pairs += tokens * (start + (tokens + 1) / 2)
        return cls(
            decodes=decodes, context_tokens=context, chunks=prompts, prompt_tokens=prompt_tokens, prompt_pairs=pairs
        )

    @classmethod
    def of_plan(cls, plan: BatchPlan) -> StepShape:
        """Of a step of the torch backend."""
        return cls.of((chunk.start, len(chunk.token_ids)) for chunk in plan.chunks)

    @property
    def features(self) -> tuple[float, ...]:
        """Quantities that the prices of StepCosts multiply, in their order."""
        return (
            1.0,
            self.decodes,
            min(self.decodes, FEW_ROWS),
            self.context_tokens,
            self.chunks,
            self.prompt_tokens,
            min(self.prompt_tokens, FEW_TOKENS),
            self.prompt_pairs,
        )


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a step, in seconds; none is negative.

    fixed_s: any step.  decode_s: each answer gone on with; few_decode_s: that much more for the first FEW_ROWS.
    context_token_s: each token that those attend to.  chunk_s: each prompt worked on.  prompt_token_s: each of its
    tokens; few_prompt_token_s: that much more for the first FEW_TOKENS.  prompt_pair_s: each token that such a token
    attends to.
    """

    fixed_s: float
    decode_s: float = 0.0
    few_decode_s: float = 0.0
    context_token_s: float = 0.0
    chunk_s: float = 0.0
    prompt_token_s: float = 0.0
    few_prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Return the time of a step."""
        return (
            self.fixed_s
            + self.decode_s * shape.decodes
            + self.few_decode_s * min(shape.decodes, FEW_ROWS)
            + self.context_token_s * shape.context_tokens
            + self.chunk_s * shape.chunks
            + self.prompt_token_s * shape.prompt_tokens
            + self.few_prompt_token_s * min(shape.prompt_tokens, FEW_TOKENS)
            + self.prompt_pair_s * shape.prompt_pairs
        )

    def slower(self, factor: float) -> StepCosts:
        """The same worker with every price times `factor`."""
        return StepCosts(**{name: factor * price for name, price in msgspec.structs.asdict(self).items()})

    def validate(self) -> StepCosts:
        """Itself, or InvalidRequest where a price is none, or a step would take no time."""
        for name, price in msgspec.structs.asdict(self).items():
            if not 0 <= price < 3600:
                raise InvalidRequest(f"{name} is {price}; it must be between 0 and 3600 seconds", param=name)
        if self.fixed_s + self.decode_s == 0 or self.fixed_s + self.prompt_token_s == 0:
            raise InvalidRequest("step costs must have a fixed_s, or a decode_s and a prompt_token_s, above 0")
        return self


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step."""

    shape: StepShape
    seconds: float


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """Prices found in measured steps, and how well they predict those.

    error_median, error_p95: how far a step is from what the prices say, as a share of it.  bias: seconds of all steps
    together against what the prices say, as a share.  explained: the share of the steps' variance (R squared) that
    they explain.  outliers: steps so far off that they counted little.  course: how the speed of the machine
    went meanwhile, see engine.simulation.step_costs; empty where that was not kept.
    """

    costs: StepCosts
    samples: int
    outliers: int
    error_median: float
    error_p95: float
    bias: float
    explained: float
    course: tuple[float, ...] = ()


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True):
    """Measured step costs of a model on some hardware: the file that `ericllm plan` reads.

    kv_tokens: what the KV pages of a worker would hold there where it serves.  threads: CPU threads of the worker.
    device, machine: for a person.
    max_prompts, context_tokens: the most answers at once and the longest context that were measured; 0 is not known, in
    files from before they were kept, and so are "" and None in the others.
    backend, dtype, weights, cache_bits: what computed, as ModelSpec has it.
    """

    model: str
    device: str
    machine: str
    threads: int
    max_model_len: int
    kv_tokens: int
    page_tokens: int
    step_tokens: int
    fit: StepFit
    max_prompts: int = 0
    context_tokens: int = 0
    backend: str = ""
    dtype: str = ""
    weights: str = ""
    cache_bits: int | None = None

    @property
    def costs(self) -> StepCosts:
        """The prices."""
        return self.fit.costs

    def write(self, path: Path) -> None:
        """Put it into a JSON file. Raises InvalidRequest where that cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise InvalidRequest(f"{path} could not be written: {error.strerror or error}", param="costs") from error

    @classmethod
    def read(cls, path: Path) -> MeasuredModel:
        """Read a file of `write`. Raises InvalidRequest, naming what is wrong."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise InvalidRequest(f"{path} could not be read: {error.strerror or error}", param="costs") from error
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise InvalidRequest(f"{path} holds no step costs: {error}", param="costs") from error
        found.costs.validate()
        return found


# Non-negative least squares that a few wild measurements do not lead astray. A handful of unknowns, plain Python.

_ROUNDS = 30
_TUKEY = 4.685
_SPREAD_OF_NORMAL = 1.4826
_SWEEPS = 20_000
_SETTLED = 1e-10

Row = Sequence[float]


def solve(rows: Sequence[Row], targets: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The x of no negative number that makes sum(weights * (rows x - targets)^2) least.

    Coordinate descent on the normal equations (Franc, Hlavac and Navara 2005), columns scaled to one size: each number
    in turn becomes the best for the others as they are, or 0. The problem is convex, so where it settles is the least.
    """
    count = len(rows[0])
    gram = [[0.0] * count for _ in range(count)]
    pull = [0.0] * count
    for row, target, weight in zip(rows, targets, weights, strict=True):
        for i, left in enumerate(row):
            weighted = weight * left
            pull[i] += weighted * target
            for j in range(i, count):
                gram[i][j] += weighted * row[j]
    scale = [gram[i][i] ** 0.5 or 1.0 for i in range(count)]
    for i in range(count):
        pull[i] /= scale[i]
        for j in range(i, count):
            gram[i][j] = gram[j][i] = gram[i][j] / (scale[i] * scale[j])
    return [value / size for value, size in zip(_descend(gram, pull), scale, strict=True)]


def _descend(gram: Sequence[Sequence[float]], pull: Sequence[float]) -> list[float]:
    found = [0.0] * len(pull)
    slope = [-each for each in pull]  # of half the squared error, kept up to date
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, line in enumerate(gram):
            if line[i] <= 0:
                continue
            step = max(0.0, found[i] - slope[i] / line[i]) - found[i]
            if step:
                found[i] += step
                moved = max(moved, abs(step))
                for j, each in enumerate(line):
                    slope[j] += step * each
        if moved <= _SETTLED * max(map(abs, found), default=0.0):
            break
    return found


def solve_robustly(rows: Sequence[Row], targets: Sequence[float]) -> tuple[list[float], list[float]]:
    """The same in which each target's error counts as a share of it, and those far from the others count little or
    nothing (Tukey's biweight, by iteratively reweighted least squares from the least-absolute start); the weight of
    each target, 0 to 1, as well. Targets are above 0."""
    relative = [1 / (target * target) for target in targets]
    trust = [1.0] * len(targets)
    found: list[float] = []
    for number in range(_ROUNDS):
        found = solve(rows, targets, [each * share for each, share in zip(relative, trust, strict=True)])
        errors = [
            abs(sum(value * price for value, price in zip(row, found, strict=True)) / target - 1)
            for row, target in zip(rows, targets, strict=True)
        ]
        spread = max(_SPREAD_OF_NORMAL * statistics.median(errors), 1e-9)
        if number < _ROUNDS // 3:
            trust = [1 / max(error / spread, 0.1) for error in errors]
        else:
            trust = [max(0.0, 1 - (error / (_TUKEY * spread)) ** 2) ** 2 for error in errors]
    return found, trust


MIN_SAMPLES = 16
_DISTRUSTED = 0.1


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """Return the prices that predict these steps best. Raises InvalidRequest for too few, or one that took no time."""
    if len(samples) < MIN_SAMPLES:
        raise InvalidRequest(f"{len(samples)} measured steps are too few to fit costs; the minimum is {MIN_SAMPLES}")
    for sample in samples:
        if not 0 < sample.seconds < float("inf"):
            raise InvalidRequest(f"a measured step says that it took {sample.seconds} seconds")
    targets = [sample.seconds for sample in samples]
    prices, trust = solve_robustly([sample.shape.features for sample in samples], targets)
    costs = StepCosts(**dict(zip(StepCosts.__struct_fields__, prices, strict=True)))
    return _judged(costs, samples, trust)


def _judged(costs: StepCosts, samples: Sequence[StepSample], trust: Sequence[float]) -> StepFit:
    trusted = [sample for sample, share in zip(samples, trust, strict=True) if share >= _DISTRUSTED]
    predicted_s = [costs.seconds(sample.shape) for sample in trusted]
    measured_s = [sample.seconds for sample in trusted]
    errors = sorted(abs(one / other - 1) for one, other in zip(predicted_s, measured_s, strict=True))
    mean_s = statistics.fmean(measured_s)
    missed = sum((one - other) ** 2 for one, other in zip(predicted_s, measured_s, strict=True))
    spread = sum((other - mean_s) ** 2 for other in measured_s)
    return StepFit(
        costs=costs,
        samples=len(samples),
        outliers=len(samples) - len(trusted),
        error_median=statistics.median(errors),
        error_p95=errors[int(0.95 * (len(errors) - 1))],
        bias=sum(measured_s) / sum(predicted_s) - 1,
        explained=1 - missed / spread if spread else 1.0,
        course=measured_drift(costs, samples),
    )
