"""EngineContext: what the deployments of one engine share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.devices import BusyTime
from engine.metrics.meter import Meter
from engine.placement.load_history import LoadHistoryFile
from engine.requests.tracker import RequestTracker
from engine.snapshot import DeviceReading
from engine.worker_process.hosts import NewHost
from engine.workers.replica import Replica


class ReadDevices(Protocol):
    """See ModelManager.devices."""

    def __call__(self, gone: Collection[Replica] = ()) -> Sequence[DeviceReading]: ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """devices: as placement sees them now; sample: read them again; ledger: what loads really used.

    new_worker_id: one that no worker has.  num_workers: of all models.  changed: called after every change.
    load_lock: held by the one model that loads, from before its placement until a worker is ready.
    """

    tracker: RequestTracker
    meter: Meter
    busy: BusyTime
    ledger: LoadHistoryFile | None
    new_host: NewHost
    devices: ReadDevices
    sample: Callable[[], Awaitable[None]]
    new_worker_id: Callable[[], str]
    num_workers: Callable[[], int]
    changed: Callable[[], None]
    load_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
