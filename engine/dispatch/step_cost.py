"""What a worker's step costs, learned from its steps."""

from __future__ import annotations

import msgspec

_KEEP = 0.98
_PRIOR_STEPS = 0.05
_ENOUGH_STEPS = 8
_SHORTEST_STEP_S = 1e-5


class StepPrice(msgspec.Struct, frozen=True):
    """Seconds of a step: fixed_s, and so much more for each prompt token and for each answer that it goes on with."""

    fixed_s: float = 0.01
    prompt_token_s: float = 0.0005
    answer_s: float = 0.001


class StepCost:
    """Least squares of a step's seconds on (1, prompt tokens, answers), by relative error, older steps counting less
    (the last 50 or so matter). `prior` counts as a fraction of a step of each kind, so that what was never seen keeps
    a sensible price, and steps that are all alike are no singular case."""

    def __init__(self, prior: StepPrice = StepPrice()) -> None:  # noqa: B008 - frozen
        self.steps = 0
        self._prior = (prior.fixed_s, prior.prompt_token_s, prior.answer_s)
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._seconds = [0.0] * 3
        self._add_prior(1.0)
        self._price: StepPrice | None = None

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to believe the price."""
        return self.steps >= _ENOUGH_STEPS

    @property
    def price(self) -> StepPrice:
        """The prices now; none is negative."""
        if self._price is None:
            self._price = StepPrice(*(max(0.0, weight) for weight in _solved(self._squares, self._seconds)))
        return self._price

    def observe(self, step_s: float, prompt_tokens: int, answers: int) -> None:
        """A step took `step_s` for so many prompt tokens and answers gone on with."""
        for row in range(3):
            self._seconds[row] *= _KEEP
            for column in range(3):
                self._squares[row][column] *= _KEEP
        self._add((1.0, float(prompt_tokens), float(answers)), max(step_s, _SHORTEST_STEP_S), 1.0)
        self._add_prior(1.0 - _KEEP)
        self.steps += 1
        self._price = None

    def _add_prior(self, share: float) -> None:
        for index, weight in enumerate(self._prior):
            features = tuple(float(index == each) for each in range(3))
            self._add(features, max(weight, 1e-9), share * _PRIOR_STEPS)

    def _add(self, features: tuple[float, ...], seconds: float, weight: float) -> None:
        weight /= seconds * seconds
        for row in range(3):
            self._seconds[row] += weight * features[row] * seconds
            for column in range(3):
                self._squares[row][column] += weight * features[row] * features[column]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix @ x = right, for a positive definite matrix, by Gaussian elimination on a copy."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                row[column] -= factor * rows[pivot][column]
    solution = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][column] * solution[column] for column in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
