"""Occupancy: the devices as placement must see them, with what workers hold, will hold, or would give back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.config import DeviceShare
from engine.costs import RUNTIME_BYTES, WORKERS_SHARE_WEIGHTS
from engine.devices import account
from engine.snapshot import DeviceReading, WorkerState

_TO_COME = ("starting", "loading", "restarting")


class Occupant(Protocol):
    """A worker. planned: what placement gave it; shares: what it took of that, once it knows."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def planned(self) -> tuple[DeviceShare, ...]: ...
    @property
    def shares(self) -> tuple[DeviceShare, ...]: ...


def occupied(
    readings: Sequence[DeviceReading], workers: Sequence[Occupant], gone: Collection[Occupant] = ()
) -> list[DeviceReading]:
    """The devices with the memory set aside that workers were promised and do not hold yet; on simulated ones, which
    nothing else accounts for, with all that was promised. What is promised there is promised of the machine's RAM too.
    gone: workers that are taken as gone."""
    staying = [worker for worker in workers if worker not in gone]
    holding = [worker for worker in workers if worker.state not in _TO_COME]
    simulated = account(readings, {worker.id: worker.planned for worker in staying})
    promised = _sums(worker.planned for worker in staying if worker.state in _TO_COME)
    freed = _sums(worker.shares for worker in gone if worker.state not in _TO_COME)
    found: list[DeviceReading] = []
    for reading, accounted in zip(readings, simulated, strict=True):
        if reading.kind == "simulated":
            found.append(accounted)
            continue
        more_bytes = freed.get(reading.id, 0) - promised.get(reading.id, 0)
        if reading.kind == "cpu":
            here = {each.id for each in readings if each.kind == "simulated" and each.node == reading.node}
            more_bytes += _ram_of_simulated(holding, here) - _ram_of_simulated(staying, here)
        found.append(_with(reading, more_bytes))
    return found


def _ram_of_simulated(workers: Iterable[Occupant], devices: Collection[str]) -> int:
    """RAM that workers on these simulated devices take, or will have taken. Workers with the same weights hold them
    once where that is possible: by their sizes, for nothing else tells here whose they are."""
    weights: list[int] = []
    others = 0
    for worker in workers:
        shares = [share for share in worker.planned if share.device in devices]
        if shares:
            weights.append(sum(share.weights_bytes for share in shares))
            others += sum(share.kv_bytes + share.working_bytes for share in shares) + RUNTIME_BYTES["cpu"]
    return others + sum(set(weights) if WORKERS_SHARE_WEIGHTS else weights)


def _sums(shares: Iterable[Iterable[DeviceShare]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in shares:
        for share in each:
            sums[share.device] = sums.get(share.device, 0) + share.total_bytes
    return sums


def _with(reading: DeviceReading, more_bytes: int) -> DeviceReading:
    free = min(reading.total_bytes, max(0, reading.free_bytes + more_bytes))
    return msgspec.structs.replace(reading, free_bytes=free)
