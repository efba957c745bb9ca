"""Non-negative least squares that a few wild measurements do not lead astray. A handful of unknowns, plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
