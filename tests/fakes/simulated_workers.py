"""Workers in virtual time: the real scheduler and pages, and a price instead of a computation."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many
from dataclasses import dataclass

from engine.backends.base import BackendStats, PrefixChanges, SequenceStats
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Sequence
from engine.requests.request import Request
from engine.scheduling.queue import Dispatcher, Slot
from engine.scheduling.routing import StepPrice
from engine.worker_process.protocol import RequestOutput, StepBatch

PAGE_TOKENS = 16
SALT = b"salt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. hit_rate: of prompt tokens; makespan_s: until the last answer; most_active: by worker."""

    hit_rate: float
    makespan_s: float
    most_active: tuple[int, ...]
    ttft_s: tuple[float, ...]


class SimulatedWorker:
    """One worker; `reports`: whether it tells its pages."""

    def __init__(self, name: str, price: StepPrice, *, pages: int, max_prompts: int, reports: bool = True) -> None:
        self.name = name
        self.pool = PagePool(pages, PAGE_TOKENS, SALT)
        self.scheduler = Scheduler(self.pool, max_prompts=max_prompts, step_tokens=512, max_model_len=8192)
        self.requests: dict[str, Request] = {}
        self.most_active = 0
        self._price = price
        self._reports = reports
        self._told: set[str] = set()

    def submit(self, request: Request) -> None:
        """Take a request."""
        self.requests[request.wire_id] = request
        self.most_active = max(self.most_active, len(self.requests))
        self.scheduler.submit(Sequence(request.wire_id, list(request.prompt_ids), len(request.prompt_ids)))

    def step(self) -> StepBatch:
        """One step for everybody. Answers end at their max_tokens."""
        plan = self.scheduler.plan()
        sampled = plan.sampled_sequences
        fed = sum(len(chunk.token_ids) for chunk in plan.chunks)
        answers = sum(seq.num_tokens > seq.prompt_tokens for seq in sampled)
        self.scheduler.commit(plan, [[5]] * len(sampled))
        outputs = [self._output(sequence) for sequence in sampled]
        price, counters = self._price, self.scheduler.counters
        live = (*self.scheduler.running, *self.scheduler.waiting)
        return StepBatch(
            outputs=outputs,
            answers=answers,
            step_s=price.fixed_s + (fed - answers) * price.prompt_token_s + answers * price.answer_s,
            stats=BackendStats(
                prompt_tokens_computed=counters.prompt_tokens_computed,
                sequences=tuple(
                    SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.num_tokens)
                    for each in live
                ),
            ),
            prefix=self.pool.take_changes() if self._reports else PrefixChanges(),
        )

    def _output(self, sequence: Sequence) -> RequestOutput:
        request = self.requests[sequence.id]
        request.generated.append(5)
        first = sequence.id not in self._told
        self._told.add(sequence.id)
        finished = len(request.generated) >= (request.params.max_tokens or 0)
        if finished:
            self.scheduler.remove(sequence)
            del self.requests[sequence.id]
        return RequestOutput(
            request_id=sequence.id,
            token_ids=[5],
            finish="length" if finished else None,
            cached_tokens=sequence.cached_tokens if first else None,
        )


def run(requests: Many[Request], workers: Many[SimulatedWorker], *, max_prompts: int) -> Outcome:
    """Serve requests that arrive at their `created` until the last has ended."""
    dispatcher = Dispatcher(page_tokens=PAGE_TOKENS, salt=SALT)
    by_name = {worker.name: worker for worker in workers}
    by_id = {request.wire_id: request for request in requests}
    arrivals = sorted(requests, key=lambda each: (each.created, each.order), reverse=True)
    ends: list[tuple[float, str, StepBatch]] = []
    busy: set[str] = set()
    ttft_s: list[float] = []
    now = 0.0
    while arrivals or ends:
        now = min([each.created for each in arrivals[-1:]] + [end for end, _, _ in ends[:1]])
        while arrivals and arrivals[-1].created <= now:
            dispatcher.add(arrivals.pop())
        while ends and ends[0][0] <= now:
            _, name, batch = heapq.heappop(ends)
            busy.discard(name)
            dispatcher.router.stepped(name, batch)
            for output in batch.outputs:
                request = by_id[output.request_id]
                if output.cached_tokens is not None:
                    ttft_s.append(now - request.created)
                if output.finish is not None:
                    dispatcher.remove(request)
        places = [Slot(worker=each.name, active=len(each.requests), max_prompts=max_prompts) for each in workers]
        for request, name in dispatcher.assign(places, now):
            by_name[name].submit(request)
        for worker in workers:
            if worker.requests and worker.name not in busy:
                batch = worker.step()
                busy.add(worker.name)
                heapq.heappush(ends, (now + batch.step_s, worker.name, batch))
    counters = [worker.scheduler.counters for worker in workers]
    return Outcome(
        hit_rate=sum(each.prefix_hit_tokens for each in counters) / sum(each.prefix_query_tokens for each in counters),
        makespan_s=now,
        most_active=tuple(worker.most_active for worker in workers),
        ttft_s=tuple(ttft_s),
    )
