"""Handover: what becomes of the requests of a model that another one replaces. None of them is lost to it.

A request that names no model goes to the new one where it can be tokenized again; one that names the old model is the
old one's to the end. Where both are the same folder with other settings, all of them go over, what runs included.
"""

from __future__ import annotations

import asyncio

from engine.admission import end_tokens, resolve_params, to_embed
from engine.deployment import Deployment
from engine.desk import Desk
from engine.errors import EngineError, NoModelLoaded
from engine.request import Request, compact


class Handover:
    """From `old` to `new`: either `empty`, then `complete`; or `complete`, then `finish`. `abandon` undoes `empty`."""

    def __init__(self, old: Deployment, new: Deployment, desk: Desk) -> None:
        self._old, self._new, self._desk = old, new, desk
        self._held: list[Request] = []
        self._same = old.spec.path == new.spec.path
        if self._same:
            new.adapters.inherit(old.adapters)

    @property
    def held(self) -> int:
        """Requests that wait for the new model, and are in no lane."""
        return sum(request.finish is None for request in self._held)

    def concerns(self, deployment: Deployment) -> bool:
        """Whether it is one of the two."""
        return deployment in (self._old, self._new)

    async def empty(self, drain_s: float) -> None:
        """Let the old model finish what it works on, within `drain_s`; what waits and can wait longer is held back."""
        model = self._old.model
        self._old.set("draining")
        self._hold()
        try:
            await self._drained(drain_s)
        except asyncio.CancelledError:
            self._old.set("ready", model)
            raise

    def complete(self) -> None:
        """The new model answers: it gets what was held back and what still waits for the old one."""
        if self._old.state == "ready":
            self._old.set("draining")
        self._hold()
        held, self._held = self._held, []
        for request in held:
            self._move(request)
        self._new.dispatch()

    async def finish(self, drain_s: float) -> None:
        """Let the old model finish what is its own; where all can go over, it does after `drain_s`."""
        await self._drained(drain_s if self._same else None)
        held, self._held = self._held, []
        for request in held:
            self._move(request)
        self._new.dispatch()

    def abandon(self, error: EngineError) -> None:
        """The new model does not come: what was held back goes back, or ends where the old one is gone."""
        held, self._held = self._held, []
        waiting = [request for request in held if request.finish is None]
        if self._old.state == "ready":
            for request in waiting:
                self._desk.requeue(request)
            self._old.dispatch()
        else:
            self._desk.end(waiting, error.info)

    def _hold(self) -> None:
        """Take what waits and can go over out of the old lane."""
        for request in self._old.lane.take_waiting():
            if self._may_move(request):
                self._held.append(request)
            else:
                self._desk.requeue(request)
        self._old.dispatch()

    async def _drained(self, drain_s: float | None) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self._old.lane.wait_idle()
        except TimeoutError:
            if self._same:
                self._old.take_running()
                self._held += self._old.lane.take_waiting()
            else:
                gone = (
                    f"{self._old.spec.name} was unloaded to load {self._new.spec.name} before the answer was complete"
                )
                self._desk.end(self._old.lane.live, NoModelLoaded(gone, state="unloaded").info)

    def _may_move(self, request: Request) -> bool:
        anywhere = not request.model and not request.adapter and request.encode is not None
        return self._same or (anywhere and not request.generated)

    def _move(self, request: Request) -> None:
        if request.finish is not None:
            return
        try:
            self._admit(request)
        except EngineError as error:
            self._desk.end((request,), error.info)
        else:
            request.lane = self._new.lane
            self._desk.requeue(request)

    def _admit(self, request: Request) -> None:
        """Make the request one of the new model's: its tokens, its limits."""
        model, tokenizer = self._new.require_ready()
        if not self._same and request.encode is not None:
            request.prompt_ids = compact(request.encode(tokenizer))
            request.stream.prompt_tokens = len(request.prompt_ids)
        request.params = resolve_params(
            request.prompt_ids, request.asked, self._new.spec, model, seed=request.params.seed or 0
        )
        if request.embed:
            request.params = to_embed(request.params, model)
        request.end_token_ids = end_tokens(request.params, tokenizer.eos_token_ids)
