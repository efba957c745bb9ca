"""Whose memory is whose: readings joined with what the engine's own workers say they hold. Pure, but for BusyTime."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.backends.base import LoadedModel
from engine.config import DeviceShare
from engine.devices.simulated import under_load
from engine.snapshot import DeviceReading

WINDOW_S = 1.0
"""How far back a simulated device's utilisation looks."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the engine's workers report on one device."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    working_bytes: int = 0


def claim_of(device: str, shares: Iterable[DeviceShare]) -> Claim:
    """All that `shares` hold on one device."""
    here = [share for share in shares if share.device == device]
    return Claim(
        weights_bytes=sum(share.weights_bytes for share in here),
        kv_bytes=sum(share.kv_bytes for share in here),
        working_bytes=sum(share.working_bytes for share in here),
    )


def shares_of(model: LoadedModel) -> tuple[DeviceShare, ...]:
    """Return the memory of a loaded model on each device; evenly divided where its backend does not report it."""
    number = len(model.devices)
    return model.shares or tuple(
        DeviceShare(device=device, weights_bytes=model.weights_bytes // number, kv_bytes=model.kv_bytes // number)
        for device in model.devices
    )


def account(
    readings: Sequence[DeviceReading],
    shares_by_worker: Mapping[str, Sequence[DeviceShare]],
    busy: Mapping[str, float] | None = None,
) -> tuple[DeviceReading, ...]:
    """Return `readings` with the memory of the engine's workers apart from others'.

    shares_by_worker: memory of each worker, held or promised.  busy: utilisation of simulated devices by id.
    """
    shares = [share for of_worker in shares_by_worker.values() for share in of_worker]
    return tuple(
        _simulated_reading(under_load(reading, use), claim_of(reading.id, shares), use)
        if reading.kind == "simulated"
        else split_memory(reading, claim_of(reading.id, shares))
        for reading in readings
        for use in ((busy or {}).get(reading.id, 0.0),)
    )


def split_memory(reading: DeviceReading, claim: Claim) -> DeviceReading:
    """Take weights and KV pages out of what our processes hold; the five parts still sum to the total.

    Claims are cut to what is really in use: a mapped file that was not read yet takes no memory. In a container a GPU
    lists no process, or lists them under the host's pids, which have no name here: there all that is claimed is ours,
    and a process that holds more than is left is not another's.
    """
    used = reading.total_bytes - reading.free_bytes
    listed = reading.work_bytes > 0 or any(process.name for process in reading.others)
    claimed = claim.weights_bytes + claim.kv_bytes + (0 if listed else claim.working_bytes)
    ours = min(used, max(reading.work_bytes, claimed))
    weights = min(claim.weights_bytes, ours)
    kv = min(claim.kv_bytes, ours - weights)
    others = [process for process in reading.others if listed or process.used_bytes <= used - ours]
    return msgspec.structs.replace(
        reading,
        weights_bytes=weights,
        kv_bytes=kv,
        work_bytes=ours - weights - kv,
        others_bytes=used - ours,
        others=tuple(others),
    )


def _simulated_reading(reading: DeviceReading, claim: Claim, utilisation: float) -> DeviceReading:
    """A device of which nothing is in use but what is claimed, as far as that goes."""
    weights = min(claim.weights_bytes, reading.total_bytes)
    kv = min(claim.kv_bytes, reading.total_bytes - weights)
    work = min(claim.working_bytes, reading.total_bytes - weights - kv)
    return msgspec.structs.replace(
        reading,
        utilisation=utilisation,
        weights_bytes=weights,
        kv_bytes=kv,
        work_bytes=work,
        others_bytes=0,
        free_bytes=reading.total_bytes - weights - kv - work,
    )


class BusyTime:
    """How much of the last second each device had a worker in a step. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[float, float]]] = {}

    def add_steps(self, devices: Iterable[str], *, ended: float, step_s: float) -> None:
        """A worker on `devices` did a step of `step_s` that ended at `ended`; heartbeats, which take 0, count not."""
        for device in devices if step_s > 0 else ():
            steps = self._steps.setdefault(device, deque())
            steps.append((ended - step_s, ended))
            while steps[0][1] <= ended - WINDOW_S:
                steps.popleft()

    def shares(self, now: float) -> dict[str, float]:
        """Utilisation by device, 0..1; steps of several workers at the same time count once."""
        return {device: self._busy_s(steps, now) / WINDOW_S for device, steps in self._steps.items()}

    @staticmethod
    def _busy_s(steps: Iterable[tuple[float, float]], now: float) -> float:
        busy_s, counted = 0.0, now - WINDOW_S
        for begin, end in sorted(steps):
            busy_s += max(0.0, min(end, now) - max(begin, counted))
            counted = max(counted, end)
        return busy_s
