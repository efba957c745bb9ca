"""RequestTracker: every live request from admission to its last delta, with deadlines, outputs and losses."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec

from engine.backends.base import BackendStats, FinishReason, SequenceStats
from engine.errors import ErrorInfo, RequestNotFound, RequestTimeout, WorkerFailed
from engine.metrics.meter import FinishedRequest, Meter
from engine.requests.causes import CauseWindow, TimeLedger
from engine.requests.history import RequestDetail, RequestHistory, RequestText
from engine.requests.request import Request
from engine.requests.stream import PromptProgress
from engine.scheduling.queue import ModelQueue, Slot
from engine.snapshot import RequestRow
from engine.worker_process.protocol import RequestOutput, StepBatch
from engine.workers.replica import Replica

_RECENT_REQUESTS = 50


class RequestOwner(Protocol):
    """The models that requests belong to."""

    def finished(self, request: Request) -> None:
        """Free the place on a worker of a request that ended."""

    def knobs_of(self, request: Request) -> Mapping[str, int]:
        """Return max_prompts and step_tokens of the model that answers a request."""

    def text_of(self, request: Request) -> RequestText | None:
        """Return the text of a request that may be shown; None for nothing."""

    def sequences(self, worker: str | None = None) -> Iterable[SequenceStats]:
        """Return how far the live requests of a worker are, as it reported them last; of all workers for None."""


class RequestTracker:
    """Takes requests in, hands them to workers through `assign`, and ends each exactly once. Each is in the queue of
    the model that is to answer it.

    records: those that ended.  causes: what the time of all of them goes into.
    """

    def __init__(self, owner: RequestOwner, meter: Meter) -> None:
        self.live: dict[str, Request] = {}
        self.recent: deque[RequestRow] = deque(maxlen=_RECENT_REQUESTS)
        self.records = RequestHistory()
        self.causes = CauseWindow()
        self._owner = owner
        self._meter = meter
        self._reporting: dict[str, Request] = {}  # by wire id: those that report how far their prompt is computed

    # -- admission and cancellation -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take an admitted request and start its clock; it is in no queue yet."""
        self.live[request.id] = request
        if request.reports_prompt:
            self._reporting[request.wire_id] = request
        self._meter.count("requests")
        if request.timeout_s > 0:
            request.deadline = asyncio.get_running_loop().call_later(request.timeout_s, self._expire, request)

    def assign(self, model_queue: ModelQueue, slots: Sequence[Slot]) -> list[tuple[Request, str]]:
        """The requests of a queue that go to a worker now, each with its worker's id."""
        now = _now()
        model_queue.forecast.num_places = sum(slot.max_prompts for slot in slots)
        assigned = model_queue.dispatcher.assign(slots, now)
        for request, worker in assigned:
            request.timeline.dispatched(worker, now)
            request.timeline.ledger.dispatched(now, model_queue.dispatcher.router.slow_s(worker, now))
            self.causes.add(request.timeline.ledger.count(now))
            if request.dispatched is None:
                request.dispatched = now
                self._meter.count_dispatch(model_queue.model, now - request.created)
        return assigned

    def row(self, request_id: str) -> RequestRow | None:
        """Return the row of a live request; None where there is none of that id."""
        request = self.live.get(request_id)
        return None if request is None else self._row(request, _now())

    def rows(self, now: float) -> list[RequestRow]:
        """Return the rows of all live requests."""
        stats = {each.request_id: each for each in self._owner.sequences()}
        return [
            request.row(now, stats.get(request.wire_id), request.model_queue.place(request, now))
            for request in self.live.values()
        ]

    def _row(self, request: Request, now: float) -> RequestRow:
        sequences = () if request.worker is None else self._owner.sequences(request.worker)
        stats = next((each for each in sequences if each.request_id == request.wire_id), None)
        return request.row(now, stats, request.model_queue.place(request, now))

    def detail(self, request_id: str, order: int, *, texts: bool) -> RequestDetail:
        """Return all about a request, live or ended. texts: True if texts may be shown. Raises RequestNotFound."""
        live = self.live.get(request_id)
        if live is not None and order in (0, live.order):
            now, ledger = _now(), live.timeline.ledger
            ledger.knobs = self._owner.knobs_of(live)
            why = ledger.why(now, _slow_s(live, now))
            detail = live.detail(self._row(live, now))
            return msgspec.structs.replace(detail, text=self._owner.text_of(live), texts=texts, why=why)
        ended = self.records.detail(request_id, order, texts=texts)
        if ended is None:
            raise RequestNotFound(f"unknown request {request_id}: neither running nor recent", id=request_id)
        return ended

    def cancel(self, request_id: str) -> bool:
        """End a live request with finish "cancelled"; False if there is none of that id."""
        request = self.live.get(request_id)
        if request is not None:
            self._finish(request, "cancelled")
        return request is not None

    def cancel_queued(self, model_queue: ModelQueue | None = None) -> int:
        """End every request that waits for a worker, of one model or of all, as "cancelled"; how many."""
        waiting = [
            each for each in self.live.values() if each.worker is None and model_queue in (None, each.model_queue)
        ]
        for request in waiting:
            self._finish(request, "cancelled")
        return len(waiting)

    def end(self, requests: Iterable[Request], error: ErrorInfo) -> None:
        """End these requests with this error."""
        for request in requests:
            self._finish(request, "error", error)

    def cut(self, request: Request, error: ErrorInfo) -> None:
        """End a request that has no room for another token: with finish "length", or `error` where it has none yet."""
        self._finish(request, "length" if request.generated else "error", None if request.generated else error)

    def tick(self, workers: Collection[str]) -> None:
        """Bring the causes of the last minute up to date, once a second. workers: those that there are."""
        now = _now()
        for request in self.live.values():
            self.causes.add(request.timeline.ledger.count(now, _slow_s(request, now)), request.worker)
        self.causes.tick(workers)

    # -- reports of workers -------------------------------------------------------------------------------------

    def stepped(self, replica: Replica, batch: StepBatch, before: BackendStats, model: str) -> None:
        """Hand a step's outputs to their requests. An output of a request that is no longer the worker's is dropped.

        model: the name of the worker's model.
        """
        now = _now()
        sequences = max(0, len(replica.active) - batch.stats.waiting)
        tokens = 0
        gaps: Counter[float] = Counter()  # requests of one step mostly have the same
        queued = any(request.model_queue.queued for request in islice(replica.active.values(), 1))
        if self._reporting:
            self._report_prompts(batch.stats.sequences, now)
        for wire_id, lost in batch.lost.items():
            if (request := replica.active.get(wire_id)) is not None:
                request.timeline.ledger.worker_reported(lost)
        for output in batch.outputs:
            request = replica.active.get(output.request_id)
            if request is None:
                continue
            if output.lost is not None:
                request.timeline.ledger.worker_reported(output.lost)
            tokens += len(output.token_ids)
            self._take(request, output, now, gaps)
            if output.finish is not None:
                del replica.active[output.request_id]
                self._finish(request, output.finish, _error_of(output, replica.id))
        self._meter.count_steps(
            now,
            model,
            replica.id,
            steps=batch.steps,
            step_s=batch.step_s,
            ended_at=replica.step_ended_at,
            sequences=sequences,
            output_tokens=tokens,
            gaps=gaps,
            stats=batch.stats,
            before=before,
            queued=queued,
        )

    def lost(self, worker: str, requests: Iterable[Request], error: ErrorInfo) -> None:
        """A worker died: its requests go back to the head of the queue, but one that may have caused too many deaths
        ends."""
        now = _now()
        for request in requests:
            request.timeline.leave(now, lost=True)
            request.timeline.ledger.left(now, lost=True)
            self.causes.add(request.timeline.ledger.count(now), worker)
            if request.given_up:
                request.worker = None
                failed = WorkerFailed(
                    f"the request failed: {request.deaths} workers crashed while running it. Last: {error.message}",
                    worker=worker,
                    deaths=request.deaths,
                )
                self._finish(request, "error", failed.info)
            else:
                self._meter.count("requeued")
                self.requeue(request)

    def requeue(self, request: Request) -> None:
        """A request has no worker any more and waits for another, with what it has so far."""
        now = _now()
        request.worker = None
        request.timeline.leave(now)
        request.timeline.ledger.enter(now, request.model_queue.waits)
        request.model_queue.enter(request, now)

    def _report_prompts(self, sequences: Iterable[SequenceStats], now: float) -> None:
        """Put how far prompts are computed into the streams of requests that report it."""
        for each in sequences:
            request = self._reporting.get(each.request_id)
            if request is not None and each.computed_tokens < len(request.prompt_ids):
                self._report_prompt(request, each.computed_tokens, each.cached_tokens, now)

    def _report_prompt(self, request: Request, computed_tokens: int, cached_tokens: int, now: float) -> None:
        elapsed_s = now - (now if request.dispatched is None else request.dispatched)
        total = len(request.prompt_ids)
        request.stream.set_prompt_progress(PromptProgress(total, cached_tokens, computed_tokens, elapsed_s))

    def _take(self, request: Request, output: RequestOutput, now: float, gaps: Counter[float]) -> None:
        """Hand an output to its request; the times between its tokens are counted into `gaps`."""
        between: Sequence[float] = ()
        if output.token_ids:
            begins = request.first_token is None
            between = request.add_tokens(output.token_ids, output.gaps, now)
            gaps.update(between)
            if begins:
                self._count_prefill(request, output, now)
            request.timeline.add_tokens(now, len(output.token_ids))
            request.timeline.ledger.got_tokens(now)
        elif output.finish is not None and output.error is None and not request.params.max_tokens:
            self._count_prefill(request, output, now)
        if output.prompt_logprobs or output.vector:
            request.has_prompt_logprobs = bool(output.prompt_logprobs)
            request.stream.set_prompt_results(output.prompt_logprobs, output.vector)
        request.stream.push(
            output.text,
            output.token_ids,
            output.logprobs,
            gaps=between,
            cached_tokens=request.cached_tokens,
            ttft_s=request.ttft_s,
            stop=output.stop,
            thinking=output.thinking,
            thinking_tokens=output.thinking_tokens,
        )

    def _count_prefill(self, request: Request, output: RequestOutput, now: float) -> None:
        """Its prompt is computed: its first token came, or it ended where none was to come."""
        request.cached_tokens = output.cached_tokens or 0
        queue, tokens = request.model_queue, len(request.prompt_ids)
        self._meter.count_prefill(now, queue.model, tokens, request.cached_tokens, request.ttft_s)
        if request.dispatched is not None:
            queue.forecast.add_prompt(tokens, now - request.dispatched)
        if request.reports_prompt:
            self._reporting.pop(request.wire_id, None)
            self._report_prompt(request, tokens, request.cached_tokens, now)

    # -- the end ------------------------------------------------------------------------------------------------

    def _expire(self, request: Request) -> None:
        """The deadline came: the answer ends with what it has. One that has nothing says why instead of being empty."""
        waited = RequestTimeout(
            f"no first token within {request.timeout_s:g} s",
            timeout_s=request.timeout_s,
            output_tokens=0,
        )
        self._finish(request, "timeout", None if request.generated else waited.info)

    def _finish(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        if request.finish is not None:
            return
        now, ledger = _now(), request.timeline.ledger
        ledger.knobs = self._owner.knobs_of(request)
        ledger.left(now, _slow_s(request, now))
        self.causes.add(ledger.count(now), request.worker)
        request.finish, request.error, request.finished = reason, error, now
        self.live.pop(request.id, None)
        if request.reports_prompt:
            self._reporting.pop(request.wire_id, None)
        request.model_queue.leave(request, now)
        if request.deadline is not None:
            request.deadline.cancel()
        self._account(request, reason, now)
        request.timeline.leave(now)
        row = request.row(now)
        self.recent.append(row)
        self.records.add(
            row,
            request.timeline,
            request.created,
            params=request.requested_params,
            adapter=request.adapter,
            text=self._owner.text_of(request),
        )
        on_read = partial(self._read_to_end, ledger, now)
        request.stream.end(reason, error, row, request.timeline.stays(request.created), on_read, ledger)
        self._owner.finished(request)

    def _read_to_end(self, ledger: TimeLedger, ended: float) -> None:
        now = _now()
        ledger.read_to_end(now - ended)
        self.causes.add(ledger.count(now))

    def _account(self, request: Request, reason: FinishReason, now: float) -> None:
        output_tokens = len(request.generated)
        finished = FinishedRequest(
            reason=reason,
            prompt_tokens=len(request.prompt_ids),
            output_tokens=output_tokens,
            queue_s=_between(request.created, request.dispatched),
            prefill_s=_between(request.dispatched, request.first_token),
            decode_s=_between(request.first_token, request.last_token),
            ttft_s=request.ttft_s,
            itl_s=request.itl_s,
            e2e_s=now - request.created,
            cached_tokens=request.cached_tokens,
            max_tokens=request.params.max_tokens or 0,
            choices=1 if request.choices is None else request.choices.count,
            longest=output_tokens if request.choices is None else request.choices.finish(output_tokens),
        )
        request.model_queue.longest_tokens = max(
            request.model_queue.longest_tokens, finished.prompt_tokens + output_tokens
        )
        if finished.is_whole and not finished.is_prompt_only:
            request.model_queue.forecast.add_answer(request)
        self._meter.count_finish(now, request.model_queue.model, finished)


def _slow_s(request: Request, now: float) -> float:
    return 0.0 if request.worker is None else request.model_queue.dispatcher.router.slow_s(request.worker, now)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _between(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else ended - began


def _error_of(output: RequestOutput, worker: str) -> ErrorInfo | None:
    if output.finish != "error":
        return None
    return output.error or WorkerFailed(f"worker {worker} failed the request without a cause", worker=worker).info
