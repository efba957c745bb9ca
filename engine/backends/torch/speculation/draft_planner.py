"""For whom a draft model guesses, and how far ahead: where that brings more tokens a second than it costs. No torch.

Two rules, both over times that are measured as steps go by. A pass of the draft model is made where the guesses that
are likely to hold bring more tokens per second than the step has without them. And what the draft model computes
without a guess to show for it, the text so far, is paid for out of what its guesses saved before; a draft model that
saves nothing gets a small share of the time to prove itself in, so that it cannot cost more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.torch.speculation.step_time import FIRST_HOLDS, StepTime

NEAR = 8
"""Tokens that the draft model may be behind and still guess in a pass like any other."""

TRIAL_SHARE = 0.01
"""Of the time: what a draft model may cost that saves nothing."""

_CREDIT_STEPS, _MOST_SAVED_STEPS, _MOST_LOST_STEPS = 16, 256, 64
_LEARNS, _LEARNS_OVERALL, _DRIFTS = 0.2, 0.05, 0.05
_FIRST_WAIT, _LONGEST_WAIT = 64, 4096
_PLAIN_EVERY = 32


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence to guess for. behind: known tokens that the draft model has not computed, 1 at least.  room: guesses
    that there may be."""

    name: str
    behind: int
    room: int


@dataclass(frozen=True, slots=True)
class DraftTurn:
    """What the draft model does for a sequence: computes `fed` of the tokens that it is behind, and where those are
    all of them, guesses so many."""

    fed: int
    guesses: int


class DraftPlanner:
    """The decisions. most: guesses per sequence.  time, passes: what steps of the main model and passes of the draft
    model take.

    overall: the share of guesses that hold, of all requests lately.  balance_s: what guesses saved less what they cost.
    token_s: what a step without guesses takes for each of its tokens.
    """

    def __init__(self, most: int, time: StepTime, passes: StepTime) -> None:
        self.overall = FIRST_HOLDS
        self.balance_s = 0.0
        self._most, self._time, self._passes = most, time, passes
        self._holds: dict[str, float] = {}
        self.token_s = 0.0
        self._started = False
        self._planned = self._idle = 0
        self._wait = _FIRST_WAIT

    def end(self, name: str) -> None:
        """A request has ended."""
        self._holds.pop(name, None)

    def plan(
        self, candidates: Sequence[DraftCandidate], *, rows: int, tokens: float, spare: int, budget: int
    ) -> dict[str, DraftTurn]:
        """Whose turn it is, beside a step that has `rows` rows and is expected to bring `tokens` tokens otherwise.

        spare: rows that there is room for in the step.  budget: tokens that the draft model may compute in a pass.
        """
        self._planned += 1
        if spare <= 0 or not candidates or not self._time.known or self._planned % _PLAIN_EVERY == 0:
            return {}
        holds = [self._holds.get(each.name, self.overall) for each in candidates]
        counts = num_draft_tokens(
            holds,
            [min(each.room, self._most) for each in candidates],
            rows=rows,
            tokens=tokens,
            spare=spare,
            time=self._time,
            passes=self._passes,
        )
        for each, share, count in zip(candidates, holds, counts, strict=True):
            if not count and share != self.overall:
                self._holds[each.name] = share + _DRIFTS * (self.overall - share)
        if any(counts):
            self._idle, self._wait = 0, _FIRST_WAIT
            return self._turns(candidates, counts, budget)
        return self._trial(candidates, budget)

    def passed(self, rows: int, seconds: float, near: bool) -> None:
        """A pass of the draft model took so long. near: all that it computed was to guess behind it."""
        self.balance_s -= seconds
        if near:
            self._passes.observe(rows, seconds)

    def stepped(self, decodes: int, seconds: float) -> None:
        """A step of the main model that decoded so many sequences took so long; its guesses `came` afterwards."""
        plain_s = self._time.seconds(decodes)
        if not self._started:
            self.balance_s, self._started = _CREDIT_STEPS * plain_s, True
        self.token_s = plain_s / decodes
        saved = self.balance_s + TRIAL_SHARE * seconds
        self.balance_s = max(-_MOST_LOST_STEPS * plain_s, min(_MOST_SAVED_STEPS * plain_s, saved))

    def came(self, name: str, guessed: int, held: int) -> None:
        """Of `guessed` tokens that the draft model guessed for a sequence, the first `held` were right."""
        share = self._holds.get(name, self.overall)
        for position in range(min(guessed, held + 1)):
            share += _LEARNS * ((position < held) - share)
            self.overall += _LEARNS_OVERALL * ((position < held) - self.overall)
        self._holds[name] = share
        self.balance_s += held * self.token_s - guessed * self._time.row_s

    def _turns(self, candidates: Sequence[DraftCandidate], counts: Sequence[int], budget: int) -> dict[str, DraftTurn]:
        """Those that are near first; the others catch up as far as that is paid for."""
        lost_too_much = self.balance_s <= -_MOST_LOST_STEPS * self.token_s
        turns: dict[str, DraftTurn] = {}
        chosen = (pair for pair in zip(candidates, counts, strict=True) if pair[1])
        for each, count in sorted(chosen, key=lambda pair: pair[0].behind):
            far = each.behind > NEAR
            if lost_too_much or (far and self.balance_s <= 0):
                break
            fed = min(each.behind, budget)
            if fed <= 0:
                break
            turns[each.name] = DraftTurn(fed, count if fed == each.behind else 0)
            budget -= fed
        return turns

    def _trial(self, candidates: Sequence[DraftCandidate], budget: int) -> dict[str, DraftTurn]:
        """Now and then one guess that does not look worth it, for who needs the least for it."""
        self._idle += 1
        if self._idle < self._wait or self.balance_s <= 0:
            return {}
        each = min(candidates, key=lambda candidate: candidate.behind)
        if each.behind > budget:
            return {each.name: DraftTurn(budget, 0)}
        self._idle, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return {each.name: DraftTurn(each.behind, min(1, each.room))}


def num_draft_tokens(
    holds: Sequence[float],
    rooms: Sequence[int],
    *,
    rows: int,
    tokens: float,
    spare: int,
    time: StepTime,
    passes: StepTime,
) -> list[int]:
    """How many tokens to guess for each sequence, pass by pass as long as one brings more tokens per second.

    holds, rooms: of each sequence, the share of guesses that hold and how many there may be.  rows, tokens: of the step
    without them.  spare: rows there is room for.  time, passes: of the main model's steps and of the draft model's.
    """
    taken = [0] * len(holds)
    step_s, row_s = time.seconds(rows), time.row_s + passes.row_s
    likeliest = sorted(range(len(holds)), key=lambda index: -holds[index])
    for ahead in range(max(rooms, default=0)):
        gain = 0.0
        picked: list[int] = []
        for index in likeliest:
            likely = holds[index] ** (ahead + 1)
            if likely * step_s <= tokens * row_s or len(picked) == spare:
                break
            if taken[index] == ahead < rooms[index]:
                picked.append(index)
                gain += likely
        cost_s = passes.seconds(len(picked)) + time.row_s * len(picked)
        if not picked or gain * step_s <= tokens * cost_s:
            break
        for index in picked:
            taken[index] += 1
        spare -= len(picked)
        tokens, step_s = tokens + gain, step_s + cost_s
    return taken
