"""One worker: the real scheduler, pages and outbox, and steps that take as long as measured costs say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.backends.base import BackendRequest, BackendStats, SequenceStats
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.simulation.cluster import Cluster
from engine.simulation.step_costs import SpeedDrift, StepCosts, StepShape
from engine.worker_process.outbox import MAX_INTERVAL_S, MESSAGES_PER_S, MIN_BATCHED_REQUESTS, Outbox
from engine.worker_process.protocol import StepBatch

# Many steps at once, where nothing can happen in them but that each answer grows by a token a step. A leap leaves a
# scheduler as its own plan and commit, one by one, would have: which pages a sequence holds, by number, may
# differ; how many they are does not. What becomes findable as a prefix does so with the step after it.


def uneventful_steps(scheduler: Scheduler, lefts: Iterable[int]) -> int:
    """Return for how many steps no request ends, comes in or is preempted. lefts: tokens that each answer has yet to
    get. 0 where the next step is of another kind. In the step after them no request is preempted either, as it makes
    findable the pages they filled."""
    running = scheduler.running
    if not running or (scheduler.waiting and len(running) < scheduler.limits.max_running):
        return 0
    longest = 0
    for sequence in running:
        if sequence.num_uncomputed != 1:
            return 0
        longest = max(longest, sequence.num_tokens)
    steps = min(*lefts, scheduler.max_model_len - longest) - 1
    while steps > 0 and _pages_needed(scheduler, steps + 1) > scheduler.pool.free_pages:
        steps //= 2
    return max(0, steps)


def advance_uneventful(scheduler: Scheduler, steps: int) -> None:
    """Do `steps` steps, of which `steps_ahead` said that they are possible."""
    pool = scheduler.pool
    new = [0] * steps
    for sequence in scheduler.running:
        needed = pool.pages_for(sequence.computed + steps) - len(sequence.pages)
        if needed > 0:
            pages = pool.allocate(needed)
            assert pages is not None, f"{needed} pages for {steps} steps of {sequence.id}, {pool.free_pages} are free"
            sequence.pages.extend(pages)
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
        context = sum(sequence.num_tokens for sequence in running)
        self.first_s = slower * costs.seconds(StepShape(decodes=len(running), context_tokens=context))
        self.more_s = slower * len(running) * costs.context_token_s

    def seconds(self, steps: int) -> float:
        """Return the time of the first `steps` steps."""
        return steps * self.first_s + self.more_s * steps * (steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """Return how many steps end within `seconds`."""
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


SALT = b"simulation"


@dataclass(slots=True)
class _Job:
    """A request here: its sequence, the tokens that its answer has yet to get, and whether one of them was sent."""

    sequence: Sequence
    left: int
    begun: bool = False


@dataclass(slots=True)
class Stretch:
    """Work of the worker from `began_s` until `ends_s`: a planned step, or several of nothing but answers.

    message_steps: steps per message.
    """

    began_s: float
    ends_s: float
    steps: int = 1
    plan: BatchPlan | None = None
    pace: Pace | None = None
    message_steps: int = 1

    @property
    def messages(self) -> int:
        """Messages about each of its answers."""
        return -(-self.steps // self.message_steps)


class SimulatedWorker:
    """A worker between two deaths. Its owner calls `begin` when it is idle, and `end` when the stretch is over.

    busy_s: seconds in steps.
    """

    def __init__(self, worker_id: str, cluster: Cluster) -> None:
        self.id = worker_id
        self.busy_s = 0.0
        self.steps = 0
        self.stretch: Stretch | None = None
        self._now_s = 0.0
        self.scheduler = Scheduler(
            PagePool(-(-cluster.kv_tokens // cluster.page_tokens), cluster.page_tokens, SALT),
            max_prompts=cluster.max_prompts,
            step_tokens=cluster.step_tokens,
            max_model_len=cluster.max_model_len,
            clock=lambda: self._now_s,
        )
        self.scheduler.pacing.set_target(cluster.slo_itl_s)
        self._costs = cluster.costs
        self._course = SpeedDrift(cluster.course, worker_id)
        self._outbox = Outbox()
        self._jobs: dict[str, _Job] = {}
        self._inbox: list[BackendRequest] = []
        self._leaving: list[str] = []

    @property
    def idle(self) -> bool:
        """True if it does nothing now."""
        return self.stretch is None

    def busy_until(self, now: float) -> float:
        """Seconds that it was in steps until now."""
        return self.busy_s + (now - self.stretch.began_s if self.stretch is not None else 0.0)

    # -- commands -----------------------------------------------------------------------------------------------

    def submit(self, request: BackendRequest, now: float) -> float | None:
        """Take a request with the next step. Where it does several at once, they are cut short: when they end now."""
        self._inbox.append(request)
        return self._cut(now)

    def cancel(self, request_id: str, now: float) -> float | None:
        """Forget a request before the next step; as `submit`."""
        self._leaving.append(request_id)
        return self._cut(now)

    def _cut(self, now: float) -> float | None:
        stretch = self.stretch
        if stretch is None or stretch.pace is None:
            return None
        within = stretch.pace.steps_within(now - stretch.began_s)
        steps = within if stretch.began_s + stretch.pace.seconds(within) >= now else within + 1
        steps = max(1, steps)
        if steps >= stretch.steps:
            return None
        stretch.steps = steps
        stretch.ends_s = stretch.began_s + stretch.pace.seconds(steps)
        return stretch.ends_s

    # -- steps --------------------------------------------------------------------------------------------------

    def begin(self, now: float, stolen_s: float = 0.0) -> Stretch | None:
        """Do what was asked meanwhile and begin with the next steps; None where there is nothing to do.

        stolen_s: CPU time that others took from it lately.
        """
        self._now_s = now
        self._obey()
        if not self._jobs:
            return None
        slower = self._course.slower(now)
        steps = 0 if stolen_s else uneventful_steps(self.scheduler, (job.left for job in self._jobs.values()))
        pace = Pace(self.scheduler, self._costs, slower) if steps > 1 else None
        if pace is not None and (left_s := self._course.left_s(now)) < math.inf:
            steps = min(steps, pace.steps_within(left_s))
        if pace is not None and steps > 1:
            every = message_steps(len(self.scheduler.running), pace.first_s)
            self.stretch = Stretch(now, now + pace.seconds(steps), steps, pace=pace, message_steps=every)
        else:
            plan = self.scheduler.plan()
            self.scheduler.times.begin_step()
            seconds = slower * self._costs.seconds(StepShape.of_plan(plan)) + stolen_s if plan.chunks else 0.0
            self.stretch = Stretch(now, now + seconds, plan=plan)
        return self.stretch

    def end(self) -> StepBatch | None:
        """End the stretch; returns the message of it, if it sends one now."""
        stretch, self.stretch = self.stretch, None
        assert stretch is not None, f"{self.id} does nothing that could end"
        self._now_s = stretch.ends_s
        self.busy_s += stretch.ends_s - stretch.began_s
        self.steps += stretch.steps
        if stretch.plan is None:
            return self._leapt(stretch)
        if self._stepped(stretch.plan, stretch):
            return self._batch(everything=bool(self.scheduler.waiting))
        return None

    def flush(self) -> StepBatch | None:
        """Return outputs that must not wait any longer: a command comes, or nothing follows. Call it before `begin`."""
        if self._outbox.has_delayed and (self._inbox or self._leaving or not self._jobs):
            return self._batch(everything=True)
        return None

    def _leapt(self, stretch: Stretch) -> StepBatch:
        if stretch.pace is not None:
            running = self.scheduler.running
            context = sum(sequence.num_tokens for sequence in running)
            self.scheduler.pacing.observe_answers(len(running), context, stretch.pace.first_s)
        advance_uneventful(self.scheduler, stretch.steps)
        new = [0] * stretch.steps
        for request_id, job in self._jobs.items():
            if job.sequence.pages:
                job.left -= stretch.steps
                self._outbox.output_of(request_id).token_ids += new
        answers = stretch.steps * len(self.scheduler.running)
        self._outbox.stepped(stretch.began_s, stretch.ends_s, answers, stretch.steps)
        return self._batch(everything=True)

    def _stepped(self, plan: BatchPlan, stretch: Stretch) -> bool:
        """Take in a planned step; returns whether a message is due."""
        for sequence in plan.exhausted:
            self._finish(sequence)
        sampled = plan.sampled_sequences
        at_end = set(map(id, self.scheduler.commit(plan, ([0] for _ in sampled))))
        went_on = 0
        for sequence in sampled:
            job = self._jobs[sequence.id]
            output = self._outbox.output_of(sequence.id)
            output.token_ids.append(0)
            job.left -= 1
            went_on += job.begun
            if not job.begun:
                job.begun, output.cached_tokens = True, sequence.cached_tokens or 0
            if job.left <= 0 or id(sequence) in at_end:
                self._finish(sequence)
        return self._outbox.stepped(stretch.began_s, stretch.ends_s, went_on)

    def _finish(self, sequence: Sequence) -> None:
        del self._jobs[sequence.id]
        self.scheduler.remove(sequence)
        self._outbox.output_of(sequence.id).finish = "length"

    def _obey(self) -> None:
        for request in self._inbox:
            token_ids = [*request.prompt_ids, *request.generated]
            sequence = Sequence(request.id, token_ids, len(request.prompt_ids), client=request.client)
            self.scheduler.submit(sequence)
            self._jobs[request.id] = _Job(sequence, (request.params.max_tokens or 0) - len(request.generated))
        for request_id in self._leaving:
            job = self._jobs.pop(request_id, None)
            self._outbox.drop(request_id)
            if job is not None:
                self.scheduler.remove(job.sequence)
        self._inbox.clear()
        self._leaving.clear()

    def _batch(self, *, everything: bool) -> StepBatch:
        done, scheduler = self._outbox.done, self.scheduler
        return StepBatch(
            outputs=self._outbox.take(everything=everything),
            stats=BackendStats(
                waiting=len(scheduler.waiting),
                pages_total=scheduler.pool.num_pages,
                pages_free=scheduler.pool.free_pages,
                prompt_tokens_computed=scheduler.counters.prompt_tokens_computed,
                preemptions=scheduler.counters.preemptions,
                sequences=tuple(
                    SequenceStats(
                        request_id=each.id,
                        computed_tokens=each.computed,
                        known_tokens=each.num_tokens,
                        cached_tokens=min(each.cached_tokens or 0, each.computed),
                    )
                    for each in (*scheduler.running, *scheduler.waiting)
                    if each.num_uncomputed > 1
                ),
            ),
            steps=done.steps,
            step_s=done.seconds / done.steps if done.steps else 0.0,
            answers=done.answers,
            prefix=scheduler.pool.take_changes(),
        )


def message_steps(answers: int, step_s: float) -> int:
    """Return after how many steps of `step_s` the outbox sends the tokens of `answers` answers."""
    if answers < MIN_BATCHED_REQUESTS:
        return 1
    return max(1, math.floor(min(MAX_INTERVAL_S, answers / MESSAGES_PER_S) / step_s))
