"""Occupancy: the devices as placement must see them, with what workers hold, will hold, or would give back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.config import DeviceShare
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
    nothing else accounts for, with all that was promised. gone: workers that are taken as gone."""
    staying = [worker for worker in workers if worker not in gone]
    simulated = account(readings, {worker.id: worker.planned for worker in staying})
    promised = _sums(worker.planned for worker in staying if worker.state in _TO_COME)
    freed = _sums(worker.shares for worker in gone if worker.state not in _TO_COME)
    return [
        accounted
        if reading.kind == "simulated"
        else _with(reading, freed.get(reading.id, 0) - promised.get(reading.id, 0))
        for reading, accounted in zip(readings, simulated, strict=True)
    ]


def _sums(shares: Iterable[Iterable[DeviceShare]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in shares:
        for share in each:
            sums[share.device] = sums.get(share.device, 0) + share.total_bytes
    return sums


def _with(reading: DeviceReading, more_bytes: int) -> DeviceReading:
    free = min(reading.total_bytes, max(0, reading.free_bytes + more_bytes))
    return msgspec.structs.replace(reading, free_bytes=free)
