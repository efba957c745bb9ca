"""Occupancy: the devices as placement must see them, with what workers hold, will hold, or would give back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.config import DeviceShare
from engine.devices import account
from engine.placement.model_memory import RUNTIME_BYTES
from engine.snapshot import DeviceReading, WorkerState

_TO_COME = ("starting", "loading", "restarting")
_HOLDING = ("ready", "draining", "stopping")


class MemoryHolder(Protocol):
    """A worker. planned: what placement gave it; shares: what it took of that, once it knows."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def planned(self) -> tuple[DeviceShare, ...]: ...
    @property
    def shares(self) -> tuple[DeviceShare, ...]: ...


def with_reservations(
    readings: Sequence[DeviceReading], workers: Sequence[MemoryHolder], leaving: Collection[MemoryHolder] = ()
) -> list[DeviceReading]:
    """The devices with the memory set aside that workers were promised and do not hold yet; on simulated ones, which
    nothing else accounts for, with all that was promised. What is promised there is promised of the machine's RAM too.
    leaving: workers that count as gone. Failed ones hold nothing, and have no promise."""
    staying = [worker for worker in workers if worker not in leaving and worker.state != "failed"]
    holding = [worker for worker in workers if worker.state in _HOLDING]
    simulated = account(readings, {worker.id: worker.planned for worker in staying})
    promised = _sums(worker.planned for worker in staying if worker.state in _TO_COME)
    freed = _sums(worker.shares for worker in holding if worker in leaving)
    found: list[DeviceReading] = []
    for reading, accounted in zip(readings, simulated, strict=True):
        if reading.kind == "simulated":
            found.append(accounted)
        elif reading.kind == "cpu":
            here = {each.id for each in readings if each.kind == "simulated" and each.node == reading.node}
            found.append(_with(reading, _ram(holding, reading.id, here) - _ram(staying, reading.id, here)))
        else:
            found.append(_with(reading, freed.get(reading.id, 0) - promised.get(reading.id, 0)))
    return found


def _ram(workers: Iterable[MemoryHolder], cpu: str, simulated: Collection[str]) -> int:
    """RAM that workers on `cpu` and on the simulated devices of its machine take, or will have taken. What workers of
    a model share counts once: it is identified by its size, the only sign of whose it is."""
    shared: set[int] = set()
    own = 0
    for worker in workers:
        shares = [share for share in worker.planned if share.device == cpu or share.device in simulated]
        shared.add(sum(share.shared_bytes for share in shares))
        own += sum(share.total_bytes - share.shared_bytes for share in shares)
        if any(share.device in simulated for share in shares):
            own += RUNTIME_BYTES["cpu"]
    return own + sum(shared)


def _sums(shares: Iterable[Iterable[DeviceShare]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in shares:
        for share in each:
            sums[share.device] = sums.get(share.device, 0) + share.total_bytes
    return sums


def _with(reading: DeviceReading, more_bytes: int) -> DeviceReading:
    free = min(reading.total_bytes, max(0, reading.free_bytes + more_bytes))
    return msgspec.structs.replace(reading, free_bytes=free)
