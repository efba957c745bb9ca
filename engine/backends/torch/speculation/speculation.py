"""Speculation: draft tokens from all sources, added to the steps where they save time, and their results.

A request's own text is searched first; where that finds nothing, the draft model drafts. The source changes nothing
about the answer (see `ngram`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from engine.backends.base import DraftPosition
from engine.backends.common.step_memory import MAX_DRAFTS
from engine.backends.sampling.sampler import SampleRow
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from engine.backends.torch.speculation.draft_model import DraftModel
from engine.backends.torch.speculation.draft_planner import DraftCandidate, DraftPlanner, DraftTask
from engine.backends.torch.speculation.ngram import NgramDrafter
from engine.backends.torch.speculation.step_time import StepTime
from engine.backends.torch_device import failure_reason, is_device_lost

# Speculation pays for itself: looking for draft tokens takes time on the host in every step, next to nothing for a
# large model, a tenth of a step of a small one with many requests. That is paid for by the time that accepted drafts
# save. Where they save less, steps run without drafts for a while, longer each time, then it is tried again. A worker
# starts with a credit of a few steps.

FREE_SHARE = 0.01
"""Share of a step's time that drafting may cost without saving anything."""

_CREDIT_STEPS = 8.0
_MAX_DEBT_STEPS = 0.5
_MAX_BALANCE_STEPS = 16.0
_FIRST_PAUSE, _MAX_PAUSE = 64, 512


class SpeculationBudget:
    """Decides in which steps to look for draft tokens. balance_s: time saved by drafts less the time spent on them."""

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._drafting, self._credit_steps = True, _CREDIT_STEPS
        self._pause_left, self._pause = 0, _FIRST_PAUSE

    def should_draft(self) -> bool:
        """Return whether to look for draft tokens for the step that is planned now."""
        self._drafting = not self._pause_left
        if not self._drafting:
            self._pause_left -= 1
        return self._drafting

    def charge(self, seconds: float) -> None:
        """Subtract time spent on drafting."""
        self.balance_s -= seconds

    def credit(self, seconds: float) -> None:
        """Add time saved by accepted drafts, less the time of computing all drafts."""
        self.balance_s += seconds

    def record_step(self, seconds: float) -> None:
        """Update the balance after a step of this duration."""
        if not self._drafting:
            return
        gain_s = (FREE_SHARE + self._credit_steps) * seconds
        self.balance_s, self._credit_steps = min(self.balance_s + gain_s, _MAX_BALANCE_STEPS * seconds), 0.0
        if self.balance_s > 0:
            self._pause = _FIRST_PAUSE
        elif self.balance_s < -_MAX_DEBT_STEPS * seconds:
            self.balance_s = 0.0
            self._pause_left, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)


_logger = logging.getLogger(__name__)

RowOf = Callable[[str], SampleRow]
"""Returns the sampler's row of a request, by its id."""


class Speculation:
    """Speculative decoding of a worker. ngram: True to search requests' texts.  draft: used where that finds nothing.
    max_drafts: per step and request.  time, passes: durations of the main model's steps and of the draft model's
    passes.
    clock: seconds.

    enabled: True if anything drafts.  positions: drafts and accepted ones, by position after the last token.
    """

    def __init__(
        self,
        *,
        ngram: bool = False,
        draft: DraftModel | None = None,
        max_drafts: int | None = None,
        time: StepTime | None = None,
        passes: StepTime | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        max_drafts = MAX_DRAFTS if max_drafts is None else max_drafts
        self.positions: tuple[DraftPosition, ...] = ()
        self.draft = draft
        self.enabled = ngram or draft is not None
        self._time = StepTime() if time is None else time
        self._ngram = NgramDrafter(max_drafts if ngram else 0, self._time)
        self._answer_rows = 1 + max_drafts
        self._planner = DraftPlanner(max_drafts, self._time, StepTime() if passes is None else passes)
        self._budget, self._clock, self._passes_s = SpeculationBudget(), clock, 0.0
        self._failed = False
        self._active: set[str] = set()
        self._drafted: set[str] = set()

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request that may have drafts, with its tokens."""
        if self.enabled:
            self._active.add(request_id)
            self._ngram.begin(request_id, token_ids)

    def end(self, request_id: str) -> None:
        """Remove a request; it gets no more drafts."""
        self._active.discard(request_id)
        self._ngram.end(request_id)
        self._planner.end(request_id)

    def add_drafts(self, plan: BatchPlan, scheduler: Scheduler, row_of: RowOf) -> None:
        """Add drafts to a planned step, if it only decodes, nothing waits, and the budget allows it: up to one row for
        each prompt that may run, or the rows of one answer with all its drafts (see `max_answer_rows`)."""
        self._drafted.clear()
        decodes, limits = len(plan.chunks), scheduler.limits
        max_rows = limits.max_running if limits.prompts_limit else max(limits.max_prompts, self._answer_rows)
        spare = max_rows - decodes
        if not self.enabled or spare <= 0 or scheduler.waiting or len(scheduler.running) > decodes:
            return
        if any(sequence.num_uncomputed > 1 for sequence in plan.sequences) or not self._budget.should_draft():
            return
        started_s, self._passes_s = self._clock(), 0.0
        drafts = self._ngram.plan([sequence.id for sequence in plan.sequences], spare)
        if self.draft is not None and not self._failed:
            by_model = self._draft_with_model(self.draft, plan, scheduler, row_of, drafts, max_rows)
            self._drafted.update(by_model)
            drafts |= by_model
        scheduler.add_drafts(plan, drafts)
        self._budget.charge(self._clock() - started_s - self._passes_s)

    def record_step(self, rows: int, decodes: int, seconds: float) -> None:
        """Record the duration of a step that only decodes. rows: of its decodes and their drafts."""
        if self.enabled:
            self._time.observe(rows, seconds)
            self._planner.record_step(decodes, seconds)
            self._budget.record_step(seconds)

    def record_result(
        self, sequence: TokenSequence, num_drafts: int, token_ids: Sequence[int], scheduler: Scheduler
    ) -> None:
        """Record the new tokens of a sequence that had `num_drafts` drafts."""
        if sequence.id not in self._active:
            return
        accepted = len(token_ids) - 1
        by_model = sequence.id in self._drafted
        self._ngram.record_result(sequence.id, 0 if by_model else num_drafts, token_ids)
        if by_model and self.draft is not None:
            self._planner.record_result(sequence.id, num_drafts, accepted)
            self.draft.record_result(sequence, accepted, scheduler.pool)
        if num_drafts:
            self._budget.credit(accepted * self._planner.token_s - num_drafts * self._time.row_s)
            self.positions = tuple(self._updated_positions(num_drafts, accepted))

    def _draft_with_model(
        self,
        model: DraftModel,
        plan: BatchPlan,
        scheduler: Scheduler,
        row_of: RowOf,
        ngram_drafts: dict[str, Sequence[int]],
        max_rows: int,
    ) -> dict[str, Sequence[int]]:
        """Return the draft model's drafts for sequences without n-gram drafts."""
        context = model.context_tokens
        sequences = {
            each.id: each
            for each in plan.sequences
            if each.id in self._active and each.id not in ngram_drafts and each.num_tokens <= context
        }
        rows = len(plan.chunks) + sum(map(len, ngram_drafts.values()))
        tasks = self._planner.plan(
            [
                DraftCandidate(each.id, each.num_tokens - each.drafted, context - each.num_tokens + 1)
                for each in sequences.values()
            ],
            rows=rows,
            tokens=len(plan.chunks) + self._ngram.expected_accepted(ngram_drafts),
            spare=max_rows - rows,
            budget=scheduler.limits.step_tokens,
        )
        reserved = {
            sequences[name]: DraftTask(task.catch_up, scheduler.reserve_drafts(sequences[name], task.num_drafts))
            for name, task in tasks.items()
        }
        try:
            return dict(model.draft(reserved, row_of, scheduler.pool, self._on_pass))
        except Exception as error:
            if is_device_lost(error):
                raise
            _logger.warning("speculation with the draft model is off: %s", failure_reason(error), exc_info=error)
            self._failed = True
            return {}

    def _on_pass(self, rows: int, seconds: float, is_regular: bool) -> None:
        self._passes_s += seconds
        self._planner.record_pass(rows, seconds, is_regular)

    def _updated_positions(self, num_drafts: int, accepted: int) -> Iterator[DraftPosition]:
        for position in range(max(num_drafts, len(self.positions))):
            counts = self.positions[position] if position < len(self.positions) else DraftPosition()
            yield DraftPosition(
                drafted=counts.drafted + (position < num_drafts), accepted=counts.accepted + (position < accepted)
            )
