"""From measured steps to step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.simulation.step_costs import StepCosts, StepFit, StepSample, measured_drift

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
