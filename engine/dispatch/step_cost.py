"""What a worker's step costs, learned from its steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_ENOUGH_STEPS = 8
_NOISE = 0.3
_DRIFT = 0.03
_DOUBT = 10.0


class StepPrice(msgspec.Struct, frozen=True):
    """Seconds of a step: fixed_s, and so much more for each prompt token and for each answer that it goes on with."""

    fixed_s: float = 0.01
    prompt_token_s: float = 0.0005
    answer_s: float = 0.001


_FIRST = msgspec.structs.astuple(StepPrice())


class StepCost:
    """A Kalman filter over the three prices, each step being one measurement of their sum. What was never seen keeps
    its price of `StepPrice()`, and what was seen long ago the one it had then.

    Assumed: a step's time is off by 30%; prices drift by 3% a step; the first ones may be wrong by ten times.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._prices = list(_FIRST)
        self._doubt = [[0.0] * 3 for _ in range(3)]
        self._price: StepPrice | None = None
        self._grow_doubt(_DOUBT)

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to believe the price."""
        return self.steps >= _ENOUGH_STEPS

    @property
    def price(self) -> StepPrice:
        """The prices now; none is negative."""
        if self._price is None:
            self._price = StepPrice(*(max(0.0, price) for price in self._prices))
        return self._price

    def observe(self, step_s: float, prompt_tokens: float, answers: float) -> None:
        """A step took `step_s` for so many prompt tokens and answers gone on with."""
        features = (1.0, prompt_tokens, answers)
        self._grow_doubt(_DRIFT)
        expected_s = _dot(features, self._prices)
        spread = [_dot(features, row) for row in self._doubt]
        # between the two, so that neither a step that hung nor a worker that became slower counts for too much
        typical_s2 = max(step_s, expected_s, 1e-6) * max(min(step_s, expected_s), 1e-6)
        gain = [each / (_dot(features, spread) + _NOISE**2 * typical_s2) for each in spread]
        for row in range(3):
            self._prices[row] += gain[row] * (step_s - expected_s)
            for column in range(3):
                self._doubt[row][column] -= gain[row] * spread[column]
        self.steps += 1
        self._price = None

    def _grow_doubt(self, share: float) -> None:
        for index, (price, first) in enumerate(zip(self._prices, _FIRST, strict=True)):
            self._doubt[index][index] += (share * max(price, first / 10)) ** 2


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Of three and three: written out, as it runs eight times in every step of every worker."""
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
