"""Switch: one model loaded, put in the place of another, or unloaded, without losing a request.

One load or unload runs at a time, as a task of its own: who asked for it may go away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec
from engine.deployment import Deployment
from engine.desk import Desk
from engine.errors import EngineBusy, EngineError, InsufficientMemory, InvalidRequest, LoadCancelled
from engine.handover import Handover
from engine.roster import Roster
from engine.sampler import DeviceSampler
from engine.surroundings import Surroundings
from engine.tasks import detached

SWITCH_DRAIN_S = 30.0


class Switch:
    """Brings deployments into the roster and out of it. on_change: after every change of it."""

    def __init__(
        self,
        roster: Roster,
        around: Surroundings,
        *,
        desk: Desk,
        sampler: DeviceSampler,
        on_change: Callable[[], None],
    ) -> None:
        self._roster = roster
        self._around = around
        self._desk = desk
        self._sampler = sampler
        self._on_change = on_change
        self._loading: asyncio.Task[LoadedModel] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._handover: Handover | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> int:
        """Requests that wait for a model that is on its way, and are in no lane."""
        return self._handover.held if self._handover is not None else 0

    @property
    def loading(self) -> asyncio.Task[LoadedModel] | None:
        """The load under way."""
        return self._loading if self._loading is not None and not self._loading.done() else None

    def awaited(self, deployment: Deployment) -> asyncio.Task[LoadedModel] | None:
        """The load that must end before this model, or its successor, can answer; None where none has to."""
        return self._loading if self._handover is not None and self._handover.concerns(deployment) else None

    async def load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        """See Engine.load; config: the settings with the new model's knobs."""
        if busy := self.busy():
            raise EngineBusy(busy, state="busy")
        self._loading = detached(self._load(spec, config, beside=beside))
        return await asyncio.shield(self._loading)

    async def cancel_load(self) -> None:
        """See Engine.cancel_load."""
        task = self._loading
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))

    async def unload(self, name: str, drain_s: float, error: EngineError) -> None:
        """Drain and unload one model, the first by default; `error` ends the requests that took too long."""
        await self.cancel_load()
        if self._unloading is not None and not self._unloading.done():
            await asyncio.shield(self._unloading)
        elif self._roster.first is not None or name:
            target = self._roster.named(name)[0]
            self._unloading = detached(self._unload(target, drain_s, error))
            await asyncio.shield(self._unloading)

    async def close(self, drain_s: float, error: EngineError) -> None:
        """Unload everything within `drain_s`, whatever is under way."""
        await self.cancel_load()
        under_way = [*self._leaving, *([self._unloading] if self._unloading else [])]
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)
        await asyncio.gather(*(self._unload(deployment, drain_s, error) for deployment in list(self._roster)))

    def busy(self) -> str:
        """Why a load cannot begin; "" where it can."""
        if any(task is not None and not task.done() for task in (self._loading, self._unloading)):
            moving = next((each for each in self._roster if each.state in ("loading", "draining", "unloading")), None)
            what = f"{moving.spec.name} is {moving.state}" if moving is not None else "a model is on its way"
            return f"{what}; wait, or cancel that first"
        return ""

    # -- loading ------------------------------------------------------------------------------------------------

    async def _load(self, spec: ModelSpec, config: EngineConfig, *, beside: bool) -> LoadedModel:
        for dead in [each for each in self._roster if each.state == "failed" and not (beside and each.replicas())]:
            await self._drop(dead)
        old = self._replaced_by(spec, beside)
        new = Deployment(self._roster.new_key(spec.name), spec, config, self._around)
        self._roster.add(new)
        try:
            new.set("loading")
            await new.read()
            await self._sampler.read(self._roster.pids())
            if old is None or not old.replicas():
                return await self._load_alone(new, old)
            return await self._replace(old, new)
        except asyncio.CancelledError:
            await self._drop(new)
            raise LoadCancelled(f"the load of {spec.name} was cancelled", model=spec.name) from None
        except EngineError as error:
            if len(self._roster) == 1:
                new.fail(error.info)
            else:
                await self._drop(new)
            raise

    def _replaced_by(self, spec: ModelSpec, beside: bool) -> Deployment | None:
        answering = [each for each in self._roster if each.state in ("ready", "idle")]
        same = next((each for each in answering if each.spec.name == spec.name), None)
        if beside and same is not None:
            raise InvalidRequest(f"there is a model named {spec.name}; give this one another name", param="name")
        return None if beside else same or self._roster.first

    async def _load_alone(self, new: Deployment, old: Deployment | None) -> LoadedModel:
        """Nothing serves that it would replace."""
        model = await new.bring_up(new.place(new.config.num_workers, self._around.devices()))
        if old is not None:
            self._roster.succeed(old, new)
            await self._drop(old)
        return model

    async def _replace(self, old: Deployment, new: Deployment) -> LoadedModel:
        """`new` for `old`: beside it where both fit, else after it; refused with nothing changed where it cannot."""
        workers = new.config.num_workers
        self._handover = handover = Handover(old, new, self._desk)
        try:
            try:
                placements = new.place(workers, self._around.devices())
            except InsufficientMemory:
                new.place(workers, self._around.devices(old.replicas()))
                await handover.empty(SWITCH_DRAIN_S)
                self._roster.succeed(old, new)
                await self._drop(old)
                await self._sampler.read(self._roster.pids())
                placements = new.place(workers, self._around.devices())
            model = await new.bring_up(placements)
            self._roster.succeed(old, new)
            handover.complete()
        except asyncio.CancelledError:
            handover.abandon(LoadCancelled(f"the load of {new.spec.name} was cancelled"))
            raise
        except EngineError as error:
            handover.abandon(error)
            raise
        finally:
            self._handover = None
        if old in self._roster:
            self._leave(self._see_off(handover, old))
        return model

    async def _see_off(self, handover: Handover, old: Deployment) -> None:
        """Let a replaced model finish what is its own, and give its memory back."""
        await handover.finish(SWITCH_DRAIN_S)
        await self._drop(old)

    # -- going --------------------------------------------------------------------------------------------------

    async def _unload(self, target: Deployment, drain_s: float, error: EngineError) -> None:
        """ready -> draining -> unloading -> gone. Cancelled while it drains, the model goes on."""
        if target.state == "ready":
            target.set("draining")
            try:
                async with asyncio.timeout(drain_s):
                    await target.lane.wait_idle()
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                target.set("ready", target.model)
                raise
        self._desk.end(target.lane.live, error.info)
        await self._drop(target)

    async def _drop(self, deployment: Deployment) -> None:
        """Give its memory back and forget it."""
        if deployment.replicas():
            await deployment.take_down()
        self._roster.remove(deployment)
        self._on_change()

    def _leave(self, work: Coroutine[object, object, None]) -> None:
        task = detached(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
