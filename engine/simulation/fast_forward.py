"""Many steps at once, where nothing can happen in them but that each answer grows by a token a step.

A leap leaves a scheduler as its own plan and commit, so many times, would have: which pages a sequence holds, by
number, may differ; how many they are does not. What becomes findable as a prefix does so with the step after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.backends.scheduler.scheduler import Scheduler
from engine.simulation.step_costs import StepCosts, StepShape


def steps_ahead(scheduler: Scheduler, lefts: Iterable[int]) -> int:
    """How many steps nothing else happens in: nobody ends, comes in or is preempted. lefts: tokens that each answer
    has yet to get. 0 where the next step is of another kind. In the step after them nobody is preempted either, as it
    makes findable what they filled."""
    running = scheduler.running
    if not running or (scheduler.waiting and len(running) < scheduler.limits.places):
        return 0
    longest = 0
    for sequence in running:
        if sequence.missing != 1:
            return 0
        longest = max(longest, sequence.known)
    steps = min(*lefts, scheduler.max_model_len - longest) - 1
    while steps > 0 and _pages_needed(scheduler, steps + 1) > scheduler.pool.free_pages:
        steps //= 2
    return max(0, steps)


def advance(scheduler: Scheduler, steps: int) -> None:
    """Do so many steps, of which `steps_ahead` said that they are possible."""
    pool = scheduler.pool
    new = [0] * steps
    for sequence in scheduler.running:
        needed = pool.pages_for(sequence.computed + steps) - len(sequence.pages)
        if needed > 0:
            pages = pool.allocate(needed)
            assert pages is not None, f"{needed} pages for {steps} steps of {sequence.id}, {pool.free_pages} are free"
            sequence.pages += pages
        sequence.token_ids += new
        sequence.computed += steps


def _pages_needed(scheduler: Scheduler, steps: int) -> int:
    pool = scheduler.pool
    return sum(
        max(0, pool.pages_for(sequence.computed + steps) - len(sequence.pages)) for sequence in scheduler.running
    )


class Pace:
    """How long such steps take: each answer attends to a token more in every step, so step i takes first + i * more.

    slower: what prices are multiplied by.
    """

    __slots__ = ("first_s", "more_s")

    def __init__(self, scheduler: Scheduler, costs: StepCosts, slower: float = 1.0) -> None:
        running = scheduler.running
        context = sum(sequence.known for sequence in running)
        self.first_s = slower * costs.seconds(StepShape(decodes=len(running), context_tokens=context))
        self.more_s = slower * len(running) * costs.context_token_s

    def seconds(self, steps: int) -> float:
        """What so many steps take."""
        return steps * self.first_s + self.more_s * steps * (steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """How many steps end within so many seconds."""
        if seconds <= 0:
            return 0
        linear = self.first_s - self.more_s / 2
        root = math.sqrt(linear * linear + 2 * self.more_s * seconds)
        steps = int(2 * seconds / (linear + root))
        while self.seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self.seconds(steps) > seconds:
            steps -= 1
        return steps
