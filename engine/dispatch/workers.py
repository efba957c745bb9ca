"""The workers as the dispatcher sees them, and where a request fits best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.prefix import page_keys
from engine.dispatch.choose import Offer, Slot, choose, may_wait
from engine.dispatch.step_cost import StepCost
from engine.dispatch.worker import WorkerView
from engine.request import Request
from engine.worker.protocol import StepBatch

_FIRST_ANSWER_TOKENS = 128.0
_ANSWER_SHARE = 1 / 32


@dataclass(slots=True)
class _Running:
    """A request that a worker works on."""

    worker: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a request goes best now. keys: of its prompt's pages; missing_tokens: those not cached there; may_wait:
    whether it had better let another one go first."""

    slot: Slot
    keys: Sequence[bytes]
    missing_tokens: int
    may_wait: bool


class Workers:
    """What is known of each worker and of the requests that run there. page_tokens, salt: how workers key pages."""

    def __init__(self, page_tokens: int, salt: bytes) -> None:
        self._page_tokens = page_tokens
        self._salt = salt
        self._views: dict[str, WorkerView] = {}
        self._running: dict[str, _Running] = {}
        self._typical_cost = StepCost()
        self._answer_tokens = _FIRST_ANSWER_TOKENS

    @property
    def running(self) -> dict[str, str]:
        """The worker of each request that was sent to one, by wire id."""
        return {wire_id: running.worker for wire_id, running in self._running.items()}

    def fit(self, request: Request, slots: Sequence[Slot], keys: Sequence[bytes] | None = None) -> Fit:
        """The best of the slots that are free, of which there is one at least; keys, where they are known already."""
        if keys is None:
            keys = page_keys(
                self._salt,
                request.prompt_ids,
                self._page_tokens,
                request.adapter_key,
                request.cache_scope,
                request.shared_tokens,
            )
        tokens = len(request.prompt_ids) + len(request.generated)
        answer_tokens = self._answer_tokens
        if request.params.max_tokens is not None:
            answer_tokens = min(answer_tokens, request.params.max_tokens - len(request.generated))
        offers = [self._offer(slot, keys, tokens) for slot in slots]
        best = choose([offer for offer in offers if offer.slot.free], tokens, answer_tokens)
        return Fit(best.slot, keys, tokens - best.cached_tokens, may_wait(offers, best))

    def send(self, request: Request, fit: Fit) -> None:
        """Count a request as running where it fits."""
        fit.slot.active += 1
        self._views[fit.slot.worker].sent(request.wire_id, fit.keys, fit.missing_tokens)
        self._running[request.wire_id] = _Running(fit.slot.worker, len(request.generated))

    def release(self, request: Request) -> bool:
        """Count a request as running no more; False where it did not run."""
        running = self._running.pop(request.wire_id, None)
        if running is None:
            return False
        if running.worker in self._views:
            self._views[running.worker].left(request.wire_id)
        return True

    def stepped(self, worker: str, batch: StepBatch) -> None:
        """A worker's report: its pages, how far its prompts are, what the step cost, and how long answers get."""
        view = self._views.get(worker)
        if view is None:
            return  # nothing was sent there yet, or it is forgotten
        prompt_tokens = view.prompt_tokens(batch.stats)
        if batch.step_s > 0:
            for cost in (view.cost, self._typical_cost):
                cost.observe(batch.step_s, prompt_tokens / batch.steps, batch.answers / batch.steps)
        view.progressed(batch)
        for output in batch.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.answer_tokens += len(output.token_ids)
            if output.finish is not None:
                self._answer_tokens += (running.answer_tokens - self._answer_tokens) * _ANSWER_SHARE

    def forget(self, worker: str) -> None:
        """It is gone, and its pages with it."""
        self._views.pop(worker, None)

    def _offer(self, slot: Slot, keys: Sequence[bytes], tokens: int) -> Offer:
        view = self._views.get(slot.worker)
        if view is None:
            view = self._views[slot.worker] = WorkerView()
        held = view.prefixes.match(keys)
        return Offer(
            slot=slot,
            cached_tokens=min(held * self._page_tokens, tokens - 1) if held else 0,
            pending_tokens=view.pending_tokens,
            price=(view.cost if view.cost.known else self._typical_cost).price,
        )
