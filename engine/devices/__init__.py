"""Readings of the machine's devices, and whose memory on them is whose."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from engine.devices.cpu_and_ram import HostProbe, cpu_name, usable_cores
from engine.devices.nvml import NvmlProbe, visible_devices
from engine.devices.simulated import SimulatedProbe, parse_devices, simulated_readings
from engine.devices.worker_memory import BusyTime, Claim, account, claim_of, shares_of, split_memory
from engine.snapshot import DeviceReading


class DeviceProbe(Protocol):
    """Reads devices. Blocking; called on a thread of its own, never twice at once."""

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """Every device now. work_bytes is all that the processes `pids` hold there, weights and KV pages included;
        the rest in use is others_bytes."""


__all__ = [
    "BusyTime",
    "Claim",
    "DeviceProbe",
    "HostProbe",
    "MachineProbe",
    "NvmlProbe",
    "SimulatedProbe",
    "account",
    "claim_of",
    "computable",
    "cpu_name",
    "new_probe",
    "parse_devices",
    "shares_of",
    "simulated_readings",
    "split_memory",
    "usable_cores",
    "visible_devices",
]


class MachineProbe:
    """Every device of this machine: its GPUs, then the host."""

    def __init__(self) -> None:
        self._probes: tuple[DeviceProbe, ...] = (NvmlProbe(), HostProbe())

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """All readings."""
        return tuple(reading for probe in self._probes for reading in probe.read(pids))


def new_probe(gib: Sequence[float] = ()) -> DeviceProbe:
    """The machine's devices; or simulated ones of `gib` GiB each in place of its GPUs."""
    return SimulatedProbe(gib) if gib else MachineProbe()


def computable(devices: Sequence[DeviceReading]) -> list[DeviceReading]:
    """Those that the installed torch can compute on: a build for CPUs sees no GPU, and a process no more than one MIG
    slice. Other machines' have been looked at there. Does not import torch."""
    cuda = _torch_has_cuda()
    return [
        device for device in devices if device.node or device.kind != "cuda" or (cuda and device.id.startswith("cuda:"))
    ]


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    return any(any(Path(place, "lib").glob("*torch_cuda*")) for place in places or ())
