"""Eviction: which models leave memory so that another one fits, and the wait until they have.

A model that leaves is unloaded as an idle one is: it finishes what it runs, and the next request for it loads it again.
Those leave whose next load costs least: seconds of a load times requests lately, over all that leave. A model stays at
least as long as its load took, so that two models which take turns spend no more than half of the time on loads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from engine.errors import EngineError, InsufficientMemory, LoadCancelled
from engine.placement.plan import Placement
from engine.snapshot import LoadPlan

if TYPE_CHECKING:
    from engine.models.deployment import Deployment
    from engine.models.manager import ModelManager

MAX_EXACT = 6
MAX_FAILURES = 100
_RETRY_S, _MAX_RETRY_S = 5.0, 60.0
_LOOK_AGAIN_S = 1.0
_log = logging.getLogger("engine")
_MIN_DEMAND = 1e-9
"""Of a model that was never asked for: among such the quickest to load leaves first."""


class LoadFailures:
    """Models that could not be loaded for a request, by name: the next request tries it again after a while that grows
    with each failure. Of MAX_FAILURES names the last ones."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float, EngineError]] = {}

    def note(self, name: str, error: EngineError, now: float) -> None:
        """A load failed."""
        count = self._failures.pop(name, (0, 0.0, error))[0]
        self._failures[name] = (count + 1, now, error)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def clear(self, name: str) -> None:
        """A load succeeded."""
        self._failures.pop(name, None)

    def check(self, name: str, now: float) -> None:
        """Raise the error of the last load while it is too early for another."""
        if (found := self._failures.get(name)) is not None:
            count, at, error = found
            if now - at < min(_MAX_RETRY_S, _RETRY_S * 2 ** min(count - 1, 10)):
                raise error


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model that may leave. load_s: seconds of its next load.  demand: requests lately, running ones included.

    size_bytes: of all of its workers.
    """

    key: str
    load_s: float
    demand: float
    size_bytes: int

    @property
    def loss(self) -> float:
        """Expected cost of its next load."""
        return self.load_s * max(self.demand, _MIN_DEMAND)


def choose_victims(
    candidates: Sequence[Candidate], fits: Callable[[Collection[str]], bool]
) -> tuple[Candidate, ...] | None:
    """Return the models that leave, the least loss of all sets without which the new one fits; None where none does.

    fits: whether it fits without these models (keys). Of more than MAX_EXACT candidates those come first whose loss is
    smallest for their size, as GreedyDual-Size-Frequency has it (Cherkasova, 1998); none leaves that need not.
    """
    if not fits([each.key for each in candidates]):
        return None
    if len(candidates) > MAX_EXACT:
        return _by_density(candidates, fits)
    sets = [chosen for size in range(len(candidates) + 1) for chosen in combinations(candidates, size)]
    for chosen in sorted(sets, key=lambda chosen: sum(each.loss for each in chosen)):
        if fits([each.key for each in chosen]):
            return chosen
    return None


def _by_density(
    candidates: Sequence[Candidate], fits: Callable[[Collection[str]], bool]
) -> tuple[Candidate, ...] | None:
    chosen = list[Candidate]()
    remaining = sorted(candidates, key=lambda each: each.loss / max(1, each.size_bytes), reverse=True)
    while not fits([each.key for each in chosen]):
        if not remaining:
            return None
        chosen.append(remaining.pop())
    for each in sorted(chosen, key=lambda each: -each.loss):
        others = [other for other in chosen if other is not each]
        if fits([other.key for other in others]):
            chosen = others
    return tuple(chosen)


class NoWaitingRequest(LoadCancelled):
    """The requests that a load was for are gone."""


@dataclass(frozen=True, slots=True)
class Room:
    """A place for the workers of a model, and what must leave memory for it: nothing where it is free now.

    victims: models that are to leave.  leaving: models that leave anyhow.
    """

    placements: list[Placement]
    victims: list[Deployment]
    leaving: list[Deployment]

    @property
    def is_free(self) -> bool:
        """True if the workers can be started."""
        return not (self.victims or self.leaving)


async def make_room(new: Deployment, models: ModelManager, room: Room) -> None:
    """Have models leave memory, and wait until one more of them has; then room is to be found again.

    Returns early where models that came meanwhile may be the better ones to leave. Where no request waits for `new` any
    more, the models that have not left yet serve on, and it raises NoWaitingRequest.
    """
    loop = asyncio.get_running_loop()
    stay_s = max((each.residency.protected_s(loop.time()) for each in room.victims), default=0.0)
    _plan_load(new, room, stay_s)
    if stay_s > 0:
        await asyncio.sleep(min(stay_s, _LOOK_AGAIN_S))
        _require_waiting(new)
        return
    left = [each.evict() for each in room.victims]
    try:
        while not all(each.done() for each in left):
            _require_waiting(new)
            await asyncio.wait(left, timeout=_LOOK_AGAIN_S)
    finally:
        for victim in room.victims:
            victim.stay()
    if not left:
        _require_waiting(new)
        leaving = [each.residency.left() for each in room.leaving]
        await asyncio.wait(leaving, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)


def _plan_load(new: Deployment, room: Room, stay_s: float) -> None:
    """Say which models leave memory before one is loaded, and in how many seconds they may."""
    names = tuple(each.spec.name for each in (*room.victims, *room.leaving))
    load_s = new.planner.expected_seconds(room.placements)
    if new.plan is None or new.plan.unloads != names:
        when = f" in {stay_s:.0f} s" if stay_s >= 1 else ""
        _log.info("%s: unloads %s%s; its load may take %.0f s", new.spec.name, " and ".join(names), when, load_s)
    new.plan = LoadPlan(unloads=names, began=time.time(), stay_s=stay_s, load_s=load_s)
    new.models.apply_changes()


def _require_waiting(new: Deployment) -> None:
    """Raise NoWaitingRequest where a load by request has no request any more."""
    if new.loaded_by_request and not new.waiting and new.model_queue.idle:
        raise NoWaitingRequest(f"no request waits for {new.spec.name} any more", model=new.spec.name)


def find_room(new: Deployment, models: ModelManager) -> Room:
    """Return where the workers of `new` go, and what must leave for them. Raises InsufficientMemory where there is no
    room even without all that may leave."""
    now = asyncio.get_running_loop().time()
    others = [each for each in models if each is not new and _holds_memory(each)]
    leaving = [each for each in others if leaves_memory(each)]
    changing = [each for each in models if each is not new and _is_changing(each)]
    victims = {each.key: each for each in others if _may_be_evicted(each)}
    placements: list[Placement] = []
    refusal: InsufficientMemory | None = None

    def fits(keys: Collection[str], removed: Sequence[Deployment] = leaving) -> bool:
        nonlocal placements, refusal
        limit = models.defaults.max_models
        if limit and len(others) - len(removed) - len(keys) >= limit:
            return False
        without = [replica for each in removed for replica in each.replicas()]
        without += [replica for key in keys for replica in victims[key].replicas()]
        try:
            placements = new.place(new.config.num_workers, models.devices(without))
        except InsufficientMemory as error:
            refusal = error
            return False
        return True

    if fits((), ()):
        return Room(placements, [], [])
    chosen = choose_victims([_candidate(each, now) for each in victims.values()], fits)
    if chosen is None and changing:
        return Room([], [], changing)
    if chosen is None:
        raise _no_room(new, models, refusal)
    return Room(placements, [victims[each.key] for each in chosen], leaving)


def _holds_memory(model: Deployment) -> bool:
    """Return whether a model has workers that are not dead for good."""
    return any(replica.state != "failed" for replica in model.replicas())


def leaves_memory(model: Deployment) -> bool:
    """Return whether a model's memory will be free soon."""
    return model.desired != "serving" and model.state in ("ready", "draining", "unloading")


def _is_changing(model: Deployment) -> bool:
    """Return whether a model's memory is about to be free, or its load has just ended: what devices have free is not
    known."""
    return model.state == "unloading" or (model.state == "loading" and not model.is_loading)


def _may_be_evicted(model: Deployment) -> bool:
    """Return whether a model may leave its memory to another one."""
    serves = model.state == "ready" and model.desired == "serving" and _holds_memory(model)
    return serves and not model.spec.pin and model.handover is None and model.retired_by is None


def _candidate(model: Deployment, now: float) -> Candidate:
    """Return the cost of a model's eviction."""
    size = sum(share.total_bytes for replica in model.replicas() for share in replica.shares)
    demand = model.residency.demand.at(now) + len(model.model_queue.live)
    return Candidate(key=model.key, load_s=model.residency.load_s, demand=demand, size_bytes=size)


def _no_room(new: Deployment, models: ModelManager, refusal: InsufficientMemory | None) -> InsufficientMemory:
    pinned = [each.spec.name for each in models if each.pool is not None and each.spec.pin]
    note = f"; pinned and never unloaded: {', '.join(pinned)}" if pinned else ""
    if refusal is None:
        return InsufficientMemory(
            f"{new.spec.name} cannot be loaded: max {models.defaults.max_models} models are loaded, and none of them "
            f"may be unloaded{note}",
            limit=models.defaults.max_models,
        )
    return InsufficientMemory(f"{refusal.message}{note}", **refusal.details)
