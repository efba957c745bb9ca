"""Surroundings: what the deployments of an engine share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.desk import Desk
from engine.devices import BusyTime
from engine.ledger import LedgerFile
from engine.metrics import Metrics
from engine.replica import Replica
from engine.snapshot import DeviceReading
from engine.worker.hosts import NewHost


class LookAtDevices(Protocol):
    """See Fleet.devices."""

    def __call__(self, gone: Collection[Replica] = ()) -> Sequence[DeviceReading]: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """devices: as placement sees them now; ledger: what loads really used.

    new_id: a worker id that none uses.  count: the workers of all.  on_change: after every change.
    """

    desk: Desk
    metrics: Metrics
    busy: BusyTime
    ledger: LedgerFile | None
    new_host: NewHost
    devices: LookAtDevices
    new_id: Callable[[], str]
    count: Callable[[], int]
    on_change: Callable[[], None]
