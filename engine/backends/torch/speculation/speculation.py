"""Tokens guessed ahead, from whichever source: what a step computes with, and what came of it.

A request's own text is looked up first; where that finds nothing, the draft model guesses. Which of them did changes
nothing about the answer (see `guesses`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from engine.backends.base import DraftPosition
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Plan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from engine.backends.torch.sampling.sampler import SampleRow
from engine.backends.torch.speculation.draft_model import DraftModel
from engine.backends.torch.speculation.draft_planner import DraftCandidate, DraftPlanner, DraftTurn
from engine.backends.torch.speculation.ngram import MAX_AHEAD, NgramDrafter, SpeculationBudget
from engine.backends.torch.speculation.step_time import StepTime
from engine.backends.torch_common.errors import failure_reason, is_device_lost

_logger = logging.getLogger(__name__)

RowOf = Callable[[str], SampleRow]
"""How the tokens of the request of that id are drawn."""


class Speculation:
    """The guesses of a worker. lookup: whether texts are looked up.  draft: what guesses where that finds nothing.
    most: tokens ahead.  time, passes: what steps of the main model and passes of the draft model take.  clock: seconds.

    told: by position ahead, how many were computed with, and how many of those held.
    """

    def __init__(
        self,
        *,
        lookup: bool = False,
        draft: DraftModel | None = None,
        most: int | None = None,
        time: StepTime | None = None,
        passes: StepTime | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        most = MAX_AHEAD if most is None else most
        self.told: tuple[DraftPosition, ...] = ()
        self.draft = draft
        self._on = lookup or draft is not None
        self._time = StepTime() if time is None else time
        self._lookup = NgramDrafter(most if lookup else 0, self._time)
        self._drafting = DraftPlanner(most, self._time, StepTime() if passes is None else passes)
        self._upkeep, self._clock, self._passes_s = SpeculationBudget(), clock, 0.0
        self._failed = False
        self._foreseeable: set[str] = set()
        self._drafted: set[str] = set()

    @property
    def guesses(self) -> bool:
        """Whether there is anything that guesses."""
        return self._on

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with these tokens, for which may be guessed."""
        if self._on:
            self._foreseeable.add(request_id)
            self._lookup.begin(request_id, token_ids)

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._foreseeable.discard(request_id)
        self._lookup.end(request_id)
        self._drafting.end(request_id)

    def add(self, plan: Plan, scheduler: Scheduler, row_of: RowOf) -> None:
        """Put guesses into a planned step, where it does nothing but go on with answers, and there is room."""
        self._drafted.clear()
        decodes = len(plan.chunks)
        spare = scheduler.limits.places - decodes
        if not self._on or spare <= 0 or scheduler.waiting or len(scheduler.running) > decodes:
            return
        if any(sequence.missing > 1 for sequence in plan.sequences) or not self._upkeep.due():
            return
        began_s, self._passes_s = self._clock(), 0.0
        self._add(plan, scheduler, row_of, spare)
        self._upkeep.spent(self._clock() - began_s - self._passes_s)

    def _add(self, plan: Plan, scheduler: Scheduler, row_of: RowOf, spare: int) -> None:
        guesses = self._lookup.plan([sequence.id for sequence in plan.sequences], spare)
        if self.draft is not None and not self._failed:
            found = self._guess(plan, scheduler, row_of, guesses)
            self._drafted.update(found)
            guesses |= found
        scheduler.add_guesses(plan, guesses)

    def stepped(self, rows: int, decodes: int, seconds: float) -> None:
        """A step of nothing but single tokens of so many sequences and guesses, `rows` in all, took so long."""
        if self._on:
            self._time.observe(rows, seconds)
            self._drafting.stepped(decodes, seconds)
            self._upkeep.stepped(seconds)

    def came(self, sequence: TokenSequence, guessed: int, token_ids: Sequence[int], scheduler: Scheduler) -> None:
        """A sequence for which so many tokens were guessed has got these."""
        if sequence.id not in self._foreseeable:
            return
        held = len(token_ids) - 1
        by_draft = sequence.id in self._drafted
        self._lookup.came(sequence.id, 0 if by_draft else guessed, token_ids)
        if by_draft and self.draft is not None:
            self._drafting.came(sequence.id, guessed, held)
            self.draft.came(sequence, held, scheduler.pool)
        if guessed:
            self._upkeep.saved(held * self._drafting.token_s - guessed * self._time.row_s)
            self.told = tuple(self._counted(guessed, held))

    def _guess(
        self, plan: Plan, scheduler: Scheduler, row_of: RowOf, guesses: dict[str, Sequence[int]]
    ) -> dict[str, Sequence[int]]:
        """What the draft model guesses for those whose text tells nothing."""
        assert self.draft is not None
        longest = self.draft.context_tokens
        sequences = {
            each.id: each
            for each in plan.sequences
            if each.id in self._foreseeable and each.id not in guesses and each.known <= longest
        }
        looked_up = sum(map(len, guesses.values()))
        turns = self._drafting.plan(
            [
                DraftCandidate(each.id, each.known - each.drafted, longest - each.known + 1)
                for each in sequences.values()
            ],
            rows=len(plan.chunks) + looked_up,
            tokens=len(plan.chunks) + self._lookup.expected(guesses),
            spare=scheduler.limits.places - len(plan.chunks) - looked_up,
            budget=scheduler.limits.step_tokens,
        )
        granted = {
            sequences[name]: DraftTurn(turn.fed, scheduler.room_ahead(sequences[name], turn.guesses))
            for name, turn in turns.items()
        }
        try:
            return dict(self.draft.guess(granted, row_of, scheduler.pool, self._passed))
        except Exception as error:
            if is_device_lost(error):
                raise
            _logger.warning("the draft model guesses no more: %s", failure_reason(error), exc_info=error)
            self._failed = True
            return {}

    def _passed(self, rows: int, seconds: float, near: bool) -> None:
        self._passes_s += seconds
        self._drafting.passed(rows, seconds, near)

    def _counted(self, guessed: int, held: int) -> Iterator[DraftPosition]:
        for position in range(max(guessed, len(self.told))):
            told = self.told[position] if position < len(self.told) else DraftPosition()
            yield DraftPosition(guessed=told.guessed + (position < guessed), held=told.held + (position < held))
