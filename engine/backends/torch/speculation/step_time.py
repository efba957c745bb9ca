"""StepTime: predicts how long steps take from the recent ones, and how probable a draft must be to pay. No torch
here."""

from __future__ import annotations

INITIAL_ACCEPTANCE_RATE = 0.5
"""Assumed share of accepted drafts before any was tried."""

_DECAY = 0.98
_ROW_SHARE = 0.2
_PRIOR_ROWS2 = 0.05


class StepTime:
    """Durations of steps of single tokens and drafts: seconds = fixed + rows x row, by least squares over the recent
    steps. While they all have about as many rows, a row is assumed to be a small part of the step."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def has_samples(self) -> bool:
        """True once a step was observed."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        """Add the duration of a step."""
        self._weight = _DECAY * self._weight + 1
        self._rows = _DECAY * self._rows + rows
        self._seconds = _DECAY * self._seconds + seconds
        self._squares = _DECAY * self._squares + rows * rows
        self._products = _DECAY * self._products + rows * seconds

    @property
    def row_s(self) -> float:
        """Seconds per additional row; 0 without samples."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_rows**2
        covariance = self._products / self._weight - mean_rows * mean_s
        assumed = _ROW_SHARE * mean_s / mean_rows
        return max(0.0, (covariance + _PRIOR_ROWS2 * assumed) / (variance + _PRIOR_ROWS2))

    def seconds(self, rows: int) -> float:
        """Return the predicted seconds of a step; 0 without samples."""
        if not self._weight:
            return 0.0
        row_s = self.row_s
        return max((self._seconds + (rows * self._weight - self._rows) * row_s) / self._weight, row_s)

    def break_even_probability(self, rows: int, tokens: float) -> float:
        """Return the acceptance probability at which one more draft leaves the tokens per second of a step as they are.

        rows, tokens: of the step without it, expected tokens.
        """
        if not self._weight:
            return INITIAL_ACCEPTANCE_RATE
        step_s = self.seconds(rows)
        return min(1.0, tokens * self.row_s / step_s) if step_s else INITIAL_ACCEPTANCE_RATE
