"""One worker: the real scheduler, pages and outbox, and steps that take as long as measured costs say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.backends.base import BackendRequest, BackendStats, SequenceStats
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Plan, Sequence
from engine.simulation.cluster import Cluster
from engine.simulation.fast_forward import Pace, advance, steps_ahead
from engine.simulation.speed_drift import Course
from engine.simulation.step_costs import StepShape
from engine.worker_process.outbox import MAX_DELAY_S, MESSAGES_PER_S, MIN_BATCHED_REQUESTS, Outbox
from engine.worker_process.protocol import StepBatch

SALT = b"simulation"


@dataclass(slots=True)
class _Job:
    """A request here: its sequence, the tokens that its answer has yet to get, and whether one of them was told."""

    sequence: Sequence
    left: int
    begun: bool = False


@dataclass(slots=True)
class Stretch:
    """What the worker does from `began_s` until `ends_s`: a planned step, or several of nothing but answers.

    told_every: steps after which those are told.
    """

    began_s: float
    ends_s: float
    steps: int = 1
    plan: Plan | None = None
    pace: Pace | None = None
    told_every: int = 1

    @property
    def messages(self) -> int:
        """How often each of its answers is told of."""
        return -(-self.steps // self.told_every)


class SimulatedWorker:
    """A worker between two deaths. Whoever drives it calls `begin` when it is idle, and `end` when the stretch is over.

    busy_s: seconds in steps.
    """

    def __init__(self, worker_id: str, cluster: Cluster) -> None:
        self.id = worker_id
        self.busy_s = 0.0
        self.steps = 0
        self.stretch: Stretch | None = None
        self.scheduler = Scheduler(
            PagePool(-(-cluster.kv_tokens // cluster.page_tokens), cluster.page_tokens, SALT),
            max_prompts=cluster.max_prompts,
            step_tokens=cluster.step_tokens,
            max_model_len=cluster.max_model_len,
        )
        self._costs = cluster.costs
        self._course = Course(cluster.course, worker_id)
        self._outbox = Outbox()
        self._jobs: dict[str, _Job] = {}
        self._inbox: list[BackendRequest] = []
        self._leaving: list[str] = []

    @property
    def idle(self) -> bool:
        """Whether it does nothing now."""
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
        self._obey()
        if not self._jobs:
            return None
        slower = self._course.slower(now)
        steps = 0 if stolen_s else steps_ahead(self.scheduler, (job.left for job in self._jobs.values()))
        pace = Pace(self.scheduler, self._costs, slower) if steps > 1 else None
        if pace is not None and (left_s := self._course.left_s(now)) < math.inf:
            steps = min(steps, pace.steps_within(left_s))
        if pace is not None and steps > 1:
            told_every = steps_held(len(self.scheduler.running), pace.first_s)
            self.stretch = Stretch(now, now + pace.seconds(steps), steps, pace=pace, told_every=told_every)
        else:
            plan = self.scheduler.plan()
            seconds = slower * self._costs.seconds(StepShape.of_plan(plan)) + stolen_s if plan.chunks else 0.0
            self.stretch = Stretch(now, now + seconds, plan=plan)
        return self.stretch

    def end(self) -> StepBatch | None:
        """The stretch is over: what is told now, if anything."""
        stretch, self.stretch = self.stretch, None
        assert stretch is not None, f"{self.id} does nothing that could end"
        self.busy_s += stretch.ends_s - stretch.began_s
        self.steps += stretch.steps
        if stretch.plan is None:
            return self._leapt(stretch)
        if self._stepped(stretch.plan, stretch):
            return self._batch(everything=False)
        return None

    def flush(self) -> StepBatch | None:
        """What is held but must not be any longer: a command comes, or nothing follows. To be called before `begin`."""
        if self._outbox.holds and (self._inbox or self._leaving or not self._jobs):
            return self._batch(everything=True)
        return None

    def _leapt(self, stretch: Stretch) -> StepBatch:
        advance(self.scheduler, stretch.steps)
        new = [0] * stretch.steps
        for request_id, job in self._jobs.items():
            if job.sequence.pages:
                job.left -= stretch.steps
                self._outbox.of(request_id).token_ids += new
        done = self._outbox.done
        done.steps += stretch.steps
        done.seconds += stretch.ends_s - stretch.began_s
        done.answers += stretch.steps * len(self.scheduler.running)
        return self._batch(everything=True)

    def _stepped(self, plan: Plan, stretch: Stretch) -> bool:
        """Take in a planned step; whether something is to be told now."""
        for sequence in plan.exhausted:
            self._finish(sequence)
        sampled = plan.sampled
        at_end = set(map(id, self.scheduler.commit(plan, ([0] for _ in sampled))))
        went_on = 0
        for sequence in sampled:
            job = self._jobs[sequence.id]
            output = self._outbox.of(sequence.id)
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
        self._outbox.of(sequence.id).finish = "length"

    def _obey(self) -> None:
        for request in self._inbox:
            token_ids = [*request.prompt_ids, *request.generated]
            sequence = Sequence(request.id, token_ids, len(request.prompt_ids))
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
                    SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.known)
                    for each in (*scheduler.running, *scheduler.waiting)
                    if each.missing > 1
                ),
            ),
            steps=done.steps,
            step_s=done.seconds / done.steps if done.steps else 0.0,
            answers=done.answers,
            prefix=scheduler.pool.take_changes(),
        )


def steps_held(answers: int, step_s: float) -> int:
    """After how many steps of `step_s` the outbox tells what `answers` answers brought, one of the steps included."""
    if answers < MIN_BATCHED_REQUESTS:
        return 1
    return 1 + math.floor(min(MAX_DELAY_S, answers / MESSAGES_PER_S) / step_s)
