"""Whether looking for guesses is worth the looking. No torch.

What there is to guess is looked for in every step, on the host: next to nothing beside the step of a large model, and
a tenth of that of a small one that many requests share. So it is paid for out of what guesses save. Where they save
less, nothing is looked for during some steps, more of them each time, and then it is tried again. A worker begins with
the time of a few steps to spend.
"""

from __future__ import annotations

FREE_SHARE = 0.01
"""Of a step's time: what looking may cost that saves nothing."""

_CREDIT_STEPS = 8.0
_LOST_STEPS = 0.5
_MOST_SAVED_STEPS = 16.0
_FIRST_REST, _LONGEST_REST = 64, 512


class Upkeep:
    """The account. balance_s: what guesses saved less what looking for them took, of late."""

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._looks, self._credit_steps = True, _CREDIT_STEPS
        self._resting, self._rest = 0, _FIRST_REST

    def due(self) -> bool:
        """Whether to look for guesses beside the step that is planned now."""
        self._looks = not self._resting
        if not self._looks:
            self._resting -= 1
        return self._looks

    def spent(self, seconds: float) -> None:
        """So long was looked."""
        self.balance_s -= seconds

    def saved(self, seconds: float) -> None:
        """Guesses that held, less what it took to compute with all of them."""
        self.balance_s += seconds

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        if not self._looks:
            return
        given = FREE_SHARE + self._credit_steps
        self.balance_s, self._credit_steps = min(self.balance_s + given * seconds, _MOST_SAVED_STEPS * seconds), 0.0
        if self.balance_s > 0:
            self._rest = _FIRST_REST
        elif self.balance_s < -_LOST_STEPS * seconds:
            self.balance_s = 0.0
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
