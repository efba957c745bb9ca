"""A backend that only keeps time: the torch backend's scheduler and pages, and steps in which it sleeps for as long as
step costs say. Real workers over it take real time, whatever the machine: the simulator is held against them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.base import (
    Backend,
    BackendRequest,
    BackendStats,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    SequenceStats,
    TimeLost,
    TokenEvent,
    TokenMask,
)
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from engine.config import AdapterSpec, ModelSpec
from engine.errors import InvalidRequest
from engine.simulation.cluster import Cluster
from engine.simulation.step_costs import StepShape

TOKEN_ID = 11
VOCAB_SIZE = 4096


@dataclass(slots=True)
class _Job:
    """A request: its sequence, and how many tokens of its answer were sent."""

    sequence: TokenSequence
    sent: int = 0


class TimekeepingBackend:
    """See `engine.backends.base.Backend` for what each method promises. Adapters, masks and vectors are refused."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._cluster = cluster
        self._clock, self._sleep = clock, sleep
        self._jobs: dict[str, _Job] = {}
        self._scheduler: Scheduler | None = None
        self._due_s = -math.inf

    @classmethod
    def factory(cls, cluster: Cluster) -> Callable[[ModelSpec], Backend]:
        """Makes one for every worker of such a cluster."""
        return lambda spec: cls(cluster, time.perf_counter, time.sleep)

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Loads nothing."""
        cluster = self._cluster
        pages = -(-cluster.kv_tokens // page_tokens)
        self._scheduler = Scheduler(
            PagePool(pages, page_tokens, spec.prefix_salt),
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            max_model_len=cluster.max_model_len,
            clock=self._clock,
        )
        return LoadedModel(
            backend="timekeeper",
            architecture="none",
            dtype="none",
            devices=("cpu",),
            vocab_size=VOCAB_SIZE,
            max_model_len=cluster.max_model_len,
            kv_tokens=pages * page_tokens,
            page_tokens=page_tokens,
            weights_bytes=0,
            kv_bytes=0,
            parameters=0,
        )

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request."""
        if mask is not None or request.embed or request.adapter:
            raise InvalidRequest("a backend that only keeps time has no masks, vectors or adapters")
        sequence = TokenSequence(
            request.id,
            [*request.prompt_ids, *request.generated],
            len(request.prompt_ids),
            cache_scope=request.cache_scope,
            shared_tokens=request.shared_tokens,
        )
        self._loaded.submit(sequence)
        if not self._jobs:
            self._due_s = self._clock()  # it was idle
        self._jobs[request.id] = _Job(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._loaded.remove(job.sequence)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Admit up to this many from the next step on."""
        self._loaded.limits.set_max_prompts(max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """Compute up to this many tokens from the next step on."""
        self._loaded.limits.set_step_tokens(step_tokens)

    def set_itl_target(self, target_s: float | None) -> None:
        """Keep this time between tokens from the next step on."""
        self._loaded.pacing.set_target(target_s)

    def has_work(self) -> bool:
        """Return whether any request is live."""
        return bool(self._jobs)

    def step(self) -> Sequence[TokenEvent]:
        """Plan, sleep, and a token for everybody who gets one. A step is all that a worker's loop does for it, so what
        was done since the last one was due counts in, and what a sleep was too long."""
        began_s = max(self._due_s, self._clock() - _MAX_LATE_S)
        plan = self._loaded.plan()
        events = [TokenEvent(request_id=each.id, finish="length") for each in plan.exhausted]
        if plan.chunks:
            self._due_s = began_s + self._cluster.costs.seconds(StepShape.of_plan(plan))
            self._sleep(max(0.0, self._due_s - self._clock()))
        sampled = plan.sampled_sequences
        ended = set(map(id, self._loaded.commit(plan, ([TOKEN_ID] for _ in sampled))))
        for sequence in sampled:
            job = self._jobs[sequence.id]
            job.sent += 1
            events.append(
                TokenEvent(
                    request_id=sequence.id,
                    token_id=TOKEN_ID,
                    finish="length" if id(sequence) in ended else None,
                    cached_tokens=sequence.cached_tokens if job.sent == 1 else None,
                )
            )
        for event in events:
            if event.finish is not None:
                self.cancel(event.request_id)
        return events

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        if self._scheduler is None:
            return BackendStats()
        scheduler, pool = self._scheduler, self._scheduler.pool
        return BackendStats(
            waiting=len(scheduler.waiting),
            pages_total=pool.num_pages,
            pages_free=pool.free_pages,
            pages_cached=pool.cached_pages,
            prompt_tokens_computed=scheduler.counters.prompt_tokens_computed,
            preemptions=scheduler.counters.preemptions,
            sequences=tuple(
                SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.num_tokens)
                for each in (*scheduler.running, *scheduler.waiting)
            ),
            limited=dict(scheduler.times.limited),
        )

    def time_lost(self, request_id: str) -> TimeLost:
        """Return what a request has lost."""
        return self._scheduler.times.lost(request_id) if self._scheduler is not None else TimeLost()

    def prefix_changes(self) -> PrefixChanges:
        """Pages that became findable or ceased to be since the last call."""
        return self._scheduler.pool.take_changes() if self._scheduler is not None else PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """There are none."""
        raise InvalidRequest("a backend that only keeps time has no adapters")

    def detach(self, name: str) -> None:
        """There are none."""

    def check(self) -> None:
        """Prove the accounts."""
        if self._scheduler is not None:
            self._scheduler.check()

    def unload(self) -> None:
        """Forget everything."""
        self._jobs.clear()
        self._scheduler = None

    @property
    def _loaded(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("the backend holds no model")
        return self._scheduler


_MAX_LATE_S = 0.05
