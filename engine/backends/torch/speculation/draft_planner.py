"""DraftPlanner: for which sequences a draft model drafts, and how many tokens. No torch.

Two rules, both over measured times. A pass of the draft model is made where its expected accepted drafts give more
tokens per second than the step has without them. And time that the draft model spends without drafting, to catch up
with a text, is paid for by the time that its drafts saved; one that saves nothing gets a small share of the time as a
trial, and so cannot cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.torch.speculation.step_time import INITIAL_ACCEPTANCE_RATE, StepTime

MAX_LAG_TOKENS = 8
"""Uncomputed tokens with which the draft model still drafts in a regular pass."""

TRIAL_SHARE = 0.01
"""Share of the time that a draft model may cost without saving anything."""

_CREDIT_STEPS, _MAX_BALANCE_STEPS, _MAX_DEBT_STEPS = 16, 256, 64
_LEARNING_RATE, _MEAN_LEARNING_RATE, _DRIFT_RATE = 0.2, 0.05, 0.05
_FIRST_WAIT, _MAX_WAIT = 64, 4096
_PLAIN_EVERY = 32


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence to draft for. lag: tokens that the draft model has not computed, min 1.  room: max drafts."""

    name: str
    lag: int
    room: int


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Work of the draft model for a sequence: compute `catch_up` tokens of its lag and, if those are all, draft."""

    catch_up: int
    num_drafts: int


class DraftPlanner:
    """Plans the work of a draft model.

    max_drafts: per sequence.  time, passes: durations of the main model's steps and of the draft model's passes.
    mean_acceptance: recent share of accepted drafts, of all requests.  balance_s: time saved by drafts less their cost.
    token_s: time per token of a step without drafts.
    """

    def __init__(self, max_drafts: int, time: StepTime, passes: StepTime) -> None:
        self.mean_acceptance = INITIAL_ACCEPTANCE_RATE
        self.balance_s = 0.0
        self._max_drafts, self._time, self._passes = max_drafts, time, passes
        self._acceptance_rates: dict[str, float] = {}
        self.token_s = 0.0
        self._started = False
        self._planned = self._idle = 0
        self._wait = _FIRST_WAIT

    def end(self, name: str) -> None:
        """Remove a request."""
        self._acceptance_rates.pop(name, None)

    def plan(
        self, candidates: Sequence[DraftCandidate], *, rows: int, tokens: float, spare: int, budget: int
    ) -> dict[str, DraftTask]:
        """Plan the work for a step that has `rows` rows and `tokens` expected tokens otherwise.

        spare: rows left for drafts in the step.  budget: max tokens of a pass of the draft model.
        """
        self._planned += 1
        if spare <= 0 or not candidates or not self._time.has_samples or self._planned % _PLAIN_EVERY == 0:
            return {}
        acceptance_rates = [self._acceptance_rates.get(each.name, self.mean_acceptance) for each in candidates]
        counts = num_draft_tokens(
            acceptance_rates,
            [min(each.room, self._max_drafts) for each in candidates],
            rows=rows,
            tokens=tokens,
            spare=spare,
            time=self._time,
            passes=self._passes,
        )
        for each, rate, count in zip(candidates, acceptance_rates, counts, strict=True):
            if not count and rate != self.mean_acceptance:
                self._acceptance_rates[each.name] = rate + _DRIFT_RATE * (self.mean_acceptance - rate)
        if any(counts):
            self._idle, self._wait = 0, _FIRST_WAIT
            return self._tasks(candidates, counts, budget)
        return self._trial(candidates, budget)

    def record_pass(self, rows: int, seconds: float, is_regular: bool) -> None:
        """Record a pass of the draft model. is_regular: True if it drafted for all its sequences."""
        self.balance_s -= seconds
        if is_regular:
            self._passes.observe(rows, seconds)

    def record_step(self, decodes: int, seconds: float) -> None:
        """Record a step of the main model, before the results of its drafts."""
        plain_s = self._time.seconds(decodes)
        if not self._started:
            self.balance_s, self._started = _CREDIT_STEPS * plain_s, True
        self.token_s = plain_s / decodes
        balance_s = self.balance_s + TRIAL_SHARE * seconds
        self.balance_s = max(-_MAX_DEBT_STEPS * plain_s, min(_MAX_BALANCE_STEPS * plain_s, balance_s))

    def record_result(self, name: str, num_drafts: int, accepted: int) -> None:
        """Record that of the drafts of a sequence the first `accepted` were accepted."""
        rate = self._acceptance_rates.get(name, self.mean_acceptance)
        for position in range(min(num_drafts, accepted + 1)):
            rate += _LEARNING_RATE * ((position < accepted) - rate)
            self.mean_acceptance += _MEAN_LEARNING_RATE * ((position < accepted) - self.mean_acceptance)
        self._acceptance_rates[name] = rate
        self.balance_s += accepted * self.token_s - num_drafts * self._time.row_s

    def _tasks(self, candidates: Sequence[DraftCandidate], counts: Sequence[int], budget: int) -> dict[str, DraftTask]:
        """Plan regular passes first; the others catch up as far as the balance allows."""
        over_debt = self.balance_s <= -_MAX_DEBT_STEPS * self.token_s
        tasks: dict[str, DraftTask] = {}
        chosen = (pair for pair in zip(candidates, counts, strict=True) if pair[1])
        for each, count in sorted(chosen, key=lambda pair: pair[0].lag):
            catches_up = each.lag > MAX_LAG_TOKENS
            if over_debt or (catches_up and self.balance_s <= 0):
                break
            catch_up = min(each.lag, budget)
            if catch_up <= 0:
                break
            tasks[each.name] = DraftTask(catch_up, count if catch_up == each.lag else 0)
            budget -= catch_up
        return tasks

    def _trial(self, candidates: Sequence[DraftCandidate], budget: int) -> dict[str, DraftTask]:
        """Try one draft now and then that does not look worth it, for the sequence with the least lag."""
        self._idle += 1
        if self._idle < self._wait or self.balance_s <= 0:
            return {}
        each = min(candidates, key=lambda candidate: candidate.lag)
        if each.lag > budget:
            return {each.name: DraftTask(budget, 0)}
        self._idle, self._wait = 0, min(2 * self._wait, _MAX_WAIT)
        return {each.name: DraftTask(each.lag, min(1, each.room))}


def num_draft_tokens(
    acceptance_rates: Sequence[float],
    rooms: Sequence[int],
    *,
    rows: int,
    tokens: float,
    spare: int,
    time: StepTime,
    passes: StepTime,
) -> list[int]:
    """Return how many tokens to draft for each sequence, adding passes as long as one gives more tokens per second.

    acceptance_rates, rooms: of each sequence, and its max drafts.  rows, tokens: of the step without drafts.
    spare: rows left for drafts.  time, passes: durations of the main model's steps and of the draft model's passes.
    """
    counts = [0] * len(acceptance_rates)
    step_s, row_s = time.seconds(rows), time.row_s + passes.row_s
    by_rate = sorted(range(len(acceptance_rates)), key=lambda index: -acceptance_rates[index])
    for ahead in range(max(rooms, default=0)):
        gain = 0.0
        picked: list[int] = []
        for index in by_rate:
            probability = acceptance_rates[index] ** (ahead + 1)
            if probability * step_s <= tokens * row_s or len(picked) == spare:
                break
            if counts[index] == ahead < rooms[index]:
                picked.append(index)
                gain += probability
        cost_s = passes.seconds(len(picked)) + time.row_s * len(picked)
        if not picked or gain * step_s <= tokens * cost_s:
            break
        for index in picked:
            counts[index] += 1
        spare -= len(picked)
        tokens, step_s = tokens + gain, step_s + cost_s
    return counts
