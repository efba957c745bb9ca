"""What steps take, learned as they go by, and what a guess must be worth beside it. No torch here."""

from __future__ import annotations

FIRST_HOLDS = 0.5
"""The share of guesses that is expected to hold before anything is known."""

_FORGETS = 0.98
_ROWS_SHARE = 0.2
_DOUBT_ROWS2 = 0.05


class StepTime:
    """What steps of nothing but single tokens and guesses take: seconds = fixed + rows x row, by least squares over
    the recent ones. As long as they all have about as many rows, a row is taken for a small part of the step."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def known(self) -> bool:
        """Whether any step was observed."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._weight = _FORGETS * self._weight + 1
        self._rows = _FORGETS * self._rows + rows
        self._seconds = _FORGETS * self._seconds + seconds
        self._squares = _FORGETS * self._squares + rows * rows
        self._products = _FORGETS * self._products + rows * seconds

    @property
    def row_s(self) -> float:
        """What one more row takes; 0 while nothing is known."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_rows**2
        covariance = self._products / self._weight - mean_rows * mean_s
        assumed = _ROWS_SHARE * mean_s / mean_rows
        return max(0.0, (covariance + _DOUBT_ROWS2 * assumed) / (variance + _DOUBT_ROWS2))

    def seconds(self, rows: int) -> float:
        """What a step of so many rows takes; 0 while nothing is known."""
        if not self._weight:
            return 0.0
        row_s = self.row_s
        return max((self._seconds + (rows * self._weight - self._rows) * row_s) / self._weight, row_s)

    def worth(self, rows: int, tokens: float) -> float:
        """How likely a guess has to hold for its row to be worth its time, in a step of `rows` rows that is expected
        to bring `tokens`: as many tokens per second as the step brings without it."""
        if not self._weight:
            return FIRST_HOLDS
        step_s = self.seconds(rows)
        return min(1.0, tokens * self.row_s / step_s) if step_s else FIRST_HOLDS
