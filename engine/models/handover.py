"""Handover: the requests of a model that another one replaces. None of them is lost.

A request that names no model goes to the new one where it can be tokenized again; one that names the old model stays
with it to the end. Where both are the same folder with other settings, all of them move, running ones included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.errors import ContextLengthExceeded, EngineError, InsufficientMemory, NoModelLoaded
from engine.placement.plan import Placement
from engine.requests.admission import fit_request
from engine.requests.request import Encode, Request, compact_ids
from engine.requests.tracker import RequestTracker

if TYPE_CHECKING:
    from engine.models.deployment import Deployment

_log = logging.getLogger("engine")

DRAIN_S = 30.0
"""Seconds that a replaced model has for what it runs, where its memory is needed or where all of it can move."""


class Handover:
    """From `old` to `new`, from the order to load until `complete` or `abandon`. `waiting` are for the new model, in no
    queue."""

    def __init__(self, old: Deployment, new: Deployment, tracker: RequestTracker) -> None:
        self.old, self.new = old, new
        self._tracker = tracker
        self._waiting: list[Request] = []
        self.same_model = old.spec.path == new.spec.path
        if self.same_model:
            new.adapters.inherit(old.adapters)
        old.handover = new.handover = self

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for the new model."""
        return [request for request in self._waiting if request.finish is None]

    @property
    def final_successor(self) -> Deployment:
        """The new model, or the one that has replaced it since."""
        successor = self.new
        while successor.successor is not None and successor.state != "ready":
            successor = successor.successor
        return successor

    async def find_places(self) -> list[Placement]:
        """Return places for the workers of the new model, next to the old one, or in its memory once that is gone.

        Raises InsufficientMemory with nothing changed where neither is possible.
        """
        models, workers, replicas = self.new.models, self.new.config.num_workers, self.old.replicas()
        try:
            return self.new.place(workers, models.devices(), later=models.devices(replicas))
        except InsufficientMemory:
            if not replicas:
                raise
            self.new.place(workers, models.devices(replicas))
        self.make_room()
        await self.old.ended.wait()
        await models.sample_devices()
        return self.new.place(workers, models.devices())

    def make_room(self) -> None:
        """Have the old model leave before the new one loads; what waits and can move is held back."""
        self._hold()
        self._retire_old(DRAIN_S)

    def complete(self) -> None:
        """The new model is ready: it gets what is held and what still waits, and the old one leaves."""
        self._detach()
        self.old.successor = self.new
        if not self.old.ended.is_set():
            self._hold()
            self._retire_old(DRAIN_S if self.same_model else None)
        self._deliver()

    def abandon(self, error: EngineError) -> None:
        """The new model does not come: what is held goes back to the old one, or ends where that is gone."""
        self._detach()
        if self.old.retired_by is self:
            self.old.keep()
        waiting, self._waiting = self.waiting, []
        if self.old.state in ("ready", "draining"):
            for request in waiting:
                self.old.take(request)
            self.old.wake_owner()
            self.old.dispatch()
        else:
            self._tracker.end(waiting, error.info)

    def expire(self) -> None:
        """The old model's time is up: what it still has moves where it can, and ends where it cannot."""
        if self.same_model:
            self._requeue_running()
            self._waiting += self.old.model_queue.take_waiting()
            if self.old.successor is not None:
                self._deliver()
        else:
            self._tracker.end(self.old.model_queue.live, self._unloaded().info)

    def on_old_failed(self) -> None:
        """The old model cannot answer any more: what it had and can move waits for the new one."""
        self._hold()
        if self.old.successor is not None:
            self._deliver()

    def take(self, requests: Iterable[Request], other: Handover) -> None:
        """Hold what another handover has for the old model, which has left: it waits for the new one too."""
        for request in requests:
            if self._may_move(request, self.new):
                if request.adapter_key:
                    self.old.adapters.keep(request.adapter_key, other.old.adapters)
                self._waiting.append(request)
            else:
                self._tracker.end((request,), self._unloaded().info)

    def _detach(self) -> None:
        self.old.handover = self.new.handover = None

    def _retire_old(self, drain_s: float | None) -> None:
        self.old.retire(drain_s, self._unloaded(), by=self)

    def _unloaded(self) -> NoModelLoaded:
        old, new = self.old.spec.name, self.new.spec.name
        return NoModelLoaded(f"{old} was unloaded to load {new} before the answer was complete", state="unloaded")

    def _requeue_running(self) -> None:
        """Take every request of the old model from its worker; they wait again, with what they have so far."""
        for request in [each for each in self.old.model_queue.live if each.worker is not None]:
            self.old.release(request)
            self._tracker.requeue(request)

    def _hold(self) -> None:
        """Take what waits and can move out of the old queue."""
        for request in self.old.model_queue.take_waiting():
            if self._may_move(request, self.new):
                self._waiting.append(request)
            else:
                self.old.take(request)
        self.old.dispatch()

    def _deliver(self) -> None:
        """Give what is held to the final successor; an answer that has no room there beyond what it has is complete."""
        successor, coming = self.final_successor, self.final_successor.handover
        if coming is not None and coming.old is successor and successor.state not in ("ready", "draining"):
            waiting, self._waiting = self.waiting, []
            coming.take(waiting, self)
            return
        self._waiting = self.waiting
        while self._waiting:  # what is still held keeps its adapters at the old model, also where one before it ends
            request = self._waiting.pop(0)
            try:
                if successor.ended.is_set() or not self._may_move(request, successor):
                    raise self._unloaded()
                model, tokenizer = successor.require_ready()
                if request.prompt_of == successor.spec.path:
                    fit_request(request, successor.spec, model, tokenizer)
                if request.adapter_key:
                    successor.adapters.keep(request.adapter_key, self.old.adapters)
            except ContextLengthExceeded as error:
                self._tracker.cut(request, error.info)
            except EngineError as error:
                self._tracker.end((request,), error.info)
            else:
                successor.take(request)
        successor.dispatch()

    def _may_move(self, request: Request, to: Deployment) -> bool:
        anywhere = not request.model and not request.adapter and request.encode is not None
        return self.old.spec.path == to.spec.path or (anywhere and not request.generated)


async def retokenize(request: Request, encode: Encode, model: Deployment) -> None:
    """Make the prompt of a request with a model's tokenizer, and queue it there; where that cannot be, the request ends
    with the reason. Cancelled where the request ends or goes elsewhere."""
    name, tracker = model.spec.name, model.models.tracker
    try:
        _, tokenizer = model.require_ready()
        request.prompt_ids = compact_ids(await encode(tokenizer))
        request.prompt_of, request.shared_tokens = model.spec.path, 0
        request.stream.prompt_tokens = len(request.prompt_ids)
        fit_or_end(request, model)
    except EngineError as error:
        tracker.end((request,), error.info)
    except Exception as error:
        _log.exception("request %s could not be moved to %s", request.id, name)
        why = f"the request could not be moved to {name}: {type(error).__name__}: {error}"
        tracker.end((request,), EngineError(why).info)
    else:
        if request.finish is None:
            tracker.requeue(request)
            model.dispatch()


def fit_or_end(request: Request, model: Deployment) -> None:
    """Give a request the limits of a model that is ready; end it where it has no room there. Raises NoModelLoaded."""
    loaded, tokenizer = model.require_ready()
    try:
        fit_request(request, model.spec, loaded, tokenizer)
    except ContextLengthExceeded as error:
        model.models.tracker.cut(request, error.info)
    except EngineError as error:
        model.models.tracker.end((request,), error.info)
