"""RayProbe: the devices of this machine and of every node of the cluster, as one machine's."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Protocol

from engine.devices import DeviceProbe, new_probe
from engine.snapshot import DeviceReading


class LookingCluster(Protocol):
    """What the probe needs of the cluster."""

    @property
    def has_this_machine(self) -> bool:
        """Whether workers can run on the engine's own machine."""

    def look(self) -> tuple[DeviceReading, ...]:
        """Every node's devices, in the engine's names, but for this machine's."""

    def pids_here(self) -> set[int]:
        """The workers' processes on this machine."""


class RayProbe:
    """This machine's devices, where it is a node of the cluster, and each node's as "gpu-box/cuda:0".

    gib: simulated devices, in place of each machine's own.
    """

    def __init__(self, cluster: LookingCluster, gib: Sequence[float] = ()) -> None:
        self._cluster = cluster
        self._gib = tuple(gib)
        self._here: DeviceProbe | None = None

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """All readings. `pids` may be of any node, where they mean nothing to the others: the cluster knows which
        are where, and of `pids` only this process itself is added."""
        nodes = self._cluster.look()
        if not self._cluster.has_this_machine:
            return nodes
        if self._here is None:
            self._here = new_probe(self._gib)
        return (*self._here.read({os.getpid()} | self._cluster.pids_here()), *nodes)
