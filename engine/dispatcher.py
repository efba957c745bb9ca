"""Dispatcher: the one queue of a model, and which worker takes what. It decides; it has no clock and sends nothing.

Order: requests that lost their worker first, as their turn has come before; then clients share the places fairly
(`engine.dispatch.fairness`), and a client's own requests go by priority, which grows with waiting
(`engine.dispatch.line`). A request that lost several workers is a suspect and gets a worker to itself, so that it can
harm no other.

Worker: the one where the request costs least (`engine.dispatch.choose`), given which prefixes each holds, what each has
yet to compute, and what its steps were measured to cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.prefix import page_keys
from engine.dispatch.choose import Offer, Slot, choose
from engine.dispatch.fairness import FairQueue
from engine.dispatch.line import Line
from engine.dispatch.step_cost import StepCost
from engine.dispatch.worker import WorkerView, goes_on
from engine.request import Request
from engine.worker.protocol import StepBatch

__all__ = ["Dispatcher", "Slot"]

_FIRST_ANSWER_TOKENS = 128.0
_ANSWER_SHARE = 1 / 32


@dataclass(slots=True)
class _Running:
    """A request that a worker works on."""

    worker: str
    client: str
    answer_tokens: int


class Dispatcher:
    """The queue with its decisions. `len()` is how many wait. Every operation is O(log n), amortised, and a step's
    report O(requests in it); a prompt's pages are hashed once, when it goes to a worker.

    ageing_s: waiting so long is worth one priority.  page_tokens, salt: how workers key the pages that they report
    (LoadedModel.page_tokens, ModelSpec.prefix_salt); where they report none, any will do.
    """

    def __init__(self, *, ageing_s: float = 30.0, page_tokens: int = 16, salt: bytes = b"") -> None:
        self._page_tokens = page_tokens
        self._salt = salt
        self._queue = FairQueue(ageing_s)
        self._lost = Line(ageing_s)
        self._suspects = Line(ageing_s)
        self._running: dict[str, _Running] = {}
        self._workers: dict[str, WorkerView] = {}
        self._typical = StepCost()
        self._answer_tokens = _FIRST_ANSWER_TOKENS

    def __len__(self) -> int:
        return len(self._queue) + len(self._lost) + len(self._suspects)

    def queued_by_client(self) -> dict[str, int]:
        """How many requests of each client wait."""
        lost = Counter(request.client for line in (self._lost, self._suspects) for request in line)
        return dict(lost + Counter(self._queue.by_client()))

    # -- in and out ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that had a worker goes to the head."""
        had_worker = self._release(request) or request.dispatched is not None
        if request.suspect:
            self._suspects.add(request)
        elif had_worker:
            self._lost.add(request)
        else:
            self._queue.add(request)

    def remove(self, request: Request) -> None:
        """A request has ended, or goes elsewhere: forget it, whether it waits or a worker works on it."""
        if not self._release(request) and not self._queue.remove(request):
            self._lost.remove(request)
            self._suspects.remove(request)

    def take_all(self) -> list[Request]:
        """Take out all that wait, in order."""
        return [*self._suspects.take_all(), *self._lost.take_all(), *self._queue.take_all()]

    # -- who goes where -----------------------------------------------------------------------------------------

    def assign(self, slots: Sequence[Slot], now: float) -> list[tuple[Request, str]]:
        """Take the next requests out of the queue, each with the worker that is to have it, until all slots are full
        or none waits. Counts them into `slots`.

        One whose time is up at `now` is taken out and goes nowhere: whoever keeps its deadline is about to end it.
        """
        assigned: list[tuple[Request, str]] = []
        others = self._place_suspects(slots, now, assigned)
        while any(slot.free for slot in others) and (request := self._pop()) is not None:
            if not _expired(request, now):
                self._send(request, [slot for slot in others if slot.free], assigned)
        return assigned

    def _place_suspects(self, slots: Sequence[Slot], now: float, assigned: list[tuple[Request, str]]) -> Sequence[Slot]:
        """Give suspects empty workers. Where one finds none, the least busy worker gets nothing more until it is empty;
        the slots of the others are returned."""
        while (request := self._suspects.first()) is not None:
            empty = [slot for slot in slots if slot.free and not slot.active]
            if not empty and not _expired(request, now):
                emptying = min(slots, key=lambda slot: slot.active, default=None)
                return [slot for slot in slots if slot is not emptying]
            self._suspects.remove(request)
            if not _expired(request, now):
                slot = self._send(request, empty, assigned)
                slot.active = slot.max_prompts
        return slots

    def _pop(self) -> Request | None:
        request = self._lost.first()
        if request is None:
            return self._queue.pop()
        self._lost.remove(request)
        return request

    def _send(self, request: Request, slots: Sequence[Slot], assigned: list[tuple[Request, str]]) -> Slot:
        """Choose among slots that are free, and count the request as running there."""
        keys = page_keys(self._salt, request.prompt_ids, self._page_tokens, request.adapter)
        tokens = len(request.prompt_ids) + len(request.generated)
        answer_tokens = self._answer_tokens
        if request.params.max_tokens is not None:
            answer_tokens = min(answer_tokens, request.params.max_tokens - len(request.generated))
        offers = [self._offer(slot, keys, tokens) for slot in slots]
        best = choose(offers, tokens, answer_tokens)
        slot = best.slot
        slot.active += 1
        self._workers[slot.worker].sent(request.wire_id, keys, tokens - best.cached_tokens)
        self._running[request.wire_id] = _Running(slot.worker, request.client, len(request.generated))
        self._queue.began(request.client)
        assigned.append((request, slot.worker))
        return slot

    def _offer(self, slot: Slot, keys: Sequence[bytes], tokens: int) -> Offer:
        view = self._workers.get(slot.worker)
        if view is None:
            view = self._workers[slot.worker] = WorkerView()
        return Offer(
            slot=slot,
            cached_tokens=min(view.prefixes.match(keys) * self._page_tokens, tokens - 1),
            pending_tokens=view.pending_tokens,
            price=(view.cost if view.cost.known else self._typical).price,
        )

    def _release(self, request: Request) -> bool:
        """Count a request as running no more; False where it did not run."""
        running = self._running.pop(request.wire_id, None)
        if running is None:
            return False
        self._queue.ended(running.client)
        if running.worker in self._workers:
            self._workers[running.worker].left(request.wire_id)
        return True

    # -- what workers report ------------------------------------------------------------------------------------

    def stepped(self, worker: str, batch: StepBatch) -> None:
        """A worker's report: its pages, how far its prompts are, what the step cost, and how long answers get."""
        view = self._workers.get(worker)
        if view is None:
            return  # nothing was sent there yet
        prompt_tokens = view.prompt_tokens(batch.stats)
        if batch.step_s > 0:
            answers = sum(map(goes_on, batch.outputs))
            view.cost.observe(batch.step_s, prompt_tokens, answers)
            self._typical.observe(batch.step_s, prompt_tokens, answers)
        view.progressed(batch)
        for output in batch.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.answer_tokens += len(output.token_ids)
            if output.finish is not None:
                self._answer_tokens += (running.answer_tokens - self._answer_tokens) * _ANSWER_SHARE

    def forget_worker(self, worker: str) -> None:
        """The worker is gone, and its pages with it."""
        self._workers.pop(worker, None)


def _expired(request: Request, now: float) -> bool:
    return 0 < request.timeout_s <= now - request.created
