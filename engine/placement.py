"""Placement: where each worker goes, or why it cannot be. A pure function of devices, demand and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engine.config import ModelSpec
from engine.demand import MemoryDemand
from engine.errors import InsufficientMemory, InvalidRequest
from engine.snapshot import DeviceReading

_MIB = 2**20


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker goes. device: as in ModelSpec.device; "auto" where it spans several GPUs."""

    device: str


def place(
    workers: int,
    demand: MemoryDemand,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
) -> list[Placement]:
    """A placement for each of `workers` new workers: each on the device with most memory left, or on spec.device.

    A worker of exllamav2 spans the GPUs where its settings say so, and where it fits on all of them but on no one.

    devices: those the backend can use, "cpu" among them; GPUs are preferred.
    Raises InsufficientMemory with the numbers, InvalidRequest for a device that is not there.
    """
    free = {device.id: device.free_bytes for device in _candidates(devices, spec.device)}
    placements: list[Placement] = []
    for number in range(1, workers + 1):
        device = max(free, key=lambda name: free[name])
        if _spans(spec, demand, free, device):
            for name, share in _shares(spec, demand, free, number, workers).items():
                free[name] -= share
            placements.append(Placement(device="auto"))
            continue
        if free[device] < demand.total_bytes:
            raise _short(spec, demand, device, free[device], number, workers)
        free[device] -= demand.total_bytes
        placements.append(Placement(device=device))
    return placements


def _spans(spec: ModelSpec, demand: MemoryDemand, free: Mapping[str, int], roomiest: str) -> bool:
    if spec.backend != "exllamav2" or spec.device != "auto":
        return False
    if spec.gpu_split_gb or spec.tensor_parallel:
        return True
    return free[roomiest] < demand.total_bytes <= sum(free.values())


def _shares(
    spec: ModelSpec, demand: MemoryDemand, free: Mapping[str, int], number: int, workers: int
) -> dict[str, int]:
    """Bytes that a spanning worker takes of each GPU: as the split says, evenly when each layer is split, else the
    GPUs are filled in order, as the library does."""
    names = list(free)
    if len(spec.gpu_split_gb) > len(names):
        raise InvalidRequest(
            f"gpu_split names {len(spec.gpu_split_gb)} GPUs; this machine has {len(names)}: {', '.join(names)}",
            param="gpu_split",
        )
    if spec.gpu_split_gb:
        shares = {name: int(gigabytes * 2**30) for name, gigabytes in zip(names, spec.gpu_split_gb, strict=False)}
    elif spec.tensor_parallel:
        shares = dict.fromkeys(names, -(-demand.total_bytes // len(names)))
    else:
        shares, left = {}, demand.total_bytes
        for name in names:
            shares[name] = min(free[name], left)
            left -= shares[name]
    for name, share in shares.items():
        if share > free[name]:
            raise _short(spec, demand, name, free[name], number, workers, share_bytes=share)
    return shares


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
    spec: ModelSpec,
    demand: MemoryDemand,
    device: str,
    free_bytes: int,
    number: int,
    workers: int,
    share_bytes: int | None = None,
) -> InsufficientMemory:
    needed = demand.total_bytes if share_bytes is None else share_bytes
    short = needed - free_bytes
    which = f"worker {number} of {workers}" if workers > 1 else "a worker"
    parts = (
        f"weights {_mib(demand.weights_bytes)}, KV pages at least {_mib(demand.kv_bytes)}, "
        f"working memory {_mib(demand.working_bytes)}"
        if share_bytes is None
        else f"its share of {_mib(demand.total_bytes)}"
    )
    return InsufficientMemory(
        f"{which} with {spec.name} needs {_mib(needed)} on {device} ({parts}) "
        f"and {_mib(free_bytes)} are free: short by {_mib(short)}",
        device=device,
        needed_bytes=needed,
        free_bytes=free_bytes,
        short_bytes=short,
    )


def _mib(size_bytes: int) -> str:
    """Whole MiB, rounded up."""
    return f"{-(-size_bytes // _MIB)} MiB"
