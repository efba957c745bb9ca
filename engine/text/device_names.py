"""Names of devices as people read them: short, and never hiding that one is simulated or on another machine."""

from __future__ import annotations

from typing import Protocol

from engine.text.printable import printable

_NODE_CELLS = 10
_SHORT = {"cuda": "GPU", "sim": "SIM", "cpu": "CPU"}


class Device(Protocol):
    """A device, of this machine where `node` is ""."""

    @property
    def id(self) -> str:
        """Its id, with its node's or without."""

    @property
    def node(self) -> str:
        """The machine that it is in."""


def device_name(device_id: str) -> str:
    """ "GPU0" for cuda:0, "SIM1" for sim:1, "CPU" for cpu, "node2 GPU0" for node2/cuda:0."""
    node, _, local = device_id.rpartition("/")
    kind, _, index = local.partition(":")
    name, node = f"{_SHORT.get(kind, kind.upper())}{index}", printable(node)
    if len(node) > _NODE_CELLS:
        node = f"{node[: _NODE_CELLS - 1]}…"
    return f"{node} {name}" if node else name


def device_label(device: Device) -> str:
    """The device's name, with its node's where that is not this machine."""
    local = device.id.rpartition("/")[2]
    return device_name(f"{device.node}/{local}" if device.node else local)
