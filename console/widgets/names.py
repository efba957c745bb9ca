"""What devices are called on the screen: short, and never hiding that one is simulated or on another machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from console.widgets import text
from engine.snapshot import DeviceReading, Snapshot

_NODE_CELLS = 10
_FEW_PLACES = 3
_SHORT = {"cuda": "GPU", "sim": "SIM", "cpu": "CPU"}


def device_name(device: str) -> str:
    """ "GPU0" for cuda:0, "SIM1" for sim:1, "CPU" for cpu, "node2 GPU0" for node2/cuda:0."""
    node, _, local = device.rpartition("/")
    kind, _, index = local.partition(":")
    name = f"{_SHORT.get(kind, kind.upper())}{index}"
    return f"{text.clip(node, _NODE_CELLS)} {name}" if node else name


def reading_name(device: DeviceReading) -> str:
    """The device's name, with its node's where that is not this machine."""
    local = device.id.rpartition("/")[2]
    return device_name(f"{device.node}/{local}" if device.node else local)


def devices_name(devices: Sequence[str]) -> str:
    """Where a worker is: "GPU0", "GPU0+1" for two of a kind on one machine, "–" where nothing is known."""
    names = [device_name(device) for device in devices]
    if not names:
        return "–"
    kind = names[0].rstrip("0123456789")
    if all(name.startswith(kind) for name in names):
        return "+".join([names[0], *(name.removeprefix(kind) for name in names[1:])])
    return "+".join(names)


def places_name(workers: Iterable[Sequence[str]]) -> str:
    """Where several workers are, by the devices of each: "1 on GPU0, 2 on GPU1"; short where many have the same."""
    places = Counter(map(devices_name, workers))
    if len(places) > _FEW_PLACES and len(set(places.values())) == 1:
        return f"{next(iter(places.values()))} on each of {len(places)} devices"
    return ", ".join(f"{number} on {place}" for place, number in places.items())


def simulated(snapshot: Snapshot) -> bool:
    """Whether any of the devices is only simulated."""
    return any(device.kind == "simulated" for device in snapshot.devices)
