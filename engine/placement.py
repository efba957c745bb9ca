"""Placement: where each worker goes, or why it cannot be. A pure function of devices, demand and settings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.config import ModelSpec
from engine.demand import MemoryDemand
from engine.errors import InsufficientMemory, InvalidRequest
from engine.snapshot import DeviceReading

_MIB = 2**20


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker goes."""

    device: str


def place(
    workers: int,
    demand: MemoryDemand,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
) -> list[Placement]:
    """A placement for each of `workers` new workers: each on the device with most memory left, or on spec.device.

    devices: those the backend can use, "cpu" among them; GPUs are preferred.
    Raises InsufficientMemory with the numbers, InvalidRequest for a device that is not there.
    """
    free = {device.id: device.free_bytes for device in _candidates(devices, spec.device)}
    placements: list[Placement] = []
    for number in range(1, workers + 1):
        device = max(free, key=lambda name: free[name])
        if free[device] < demand.total_bytes:
            raise _short(spec, demand, device, free[device], number, workers)
        free[device] -= demand.total_bytes
        placements.append(Placement(device=device))
    return placements


def _candidates(devices: Sequence[DeviceReading], wanted: str) -> list[DeviceReading]:
    if wanted == "auto":
        return [device for device in devices if device.kind != "cpu"] or list(devices)
    name = "cuda:0" if wanted == "cuda" else wanted
    found = [device for device in devices if device.id == name]
    if not found:
        raise InvalidRequest(
            f"there is no device {wanted} here; there are {', '.join(device.id for device in devices)}",
            param="device",
            value=wanted,
        )
    return found


def _short(
    spec: ModelSpec, demand: MemoryDemand, device: str, free_bytes: int, number: int, workers: int
) -> InsufficientMemory:
    short = demand.total_bytes - free_bytes
    which = f"worker {number} of {workers}" if workers > 1 else "a worker"
    return InsufficientMemory(
        f"{which} with {spec.name} needs {_mib(demand.total_bytes)} on {device} (weights {_mib(demand.weights_bytes)}, "
        f"KV pages at least {_mib(demand.kv_bytes)}, working memory {_mib(demand.working_bytes)}) "
        f"and {_mib(free_bytes)} are free: short by {_mib(short)}",
        device=device,
        needed_bytes=demand.total_bytes,
        free_bytes=free_bytes,
        short_bytes=short,
    )


def _mib(size_bytes: int) -> str:
    """Whole MiB, rounded up."""
    return f"{-(-size_bytes // _MIB)} MiB"
