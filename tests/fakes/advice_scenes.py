"""Snapshots in which something is wrong or wasteful, for the adviser to speak of."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import DeviceShare
from engine.snapshot import Snapshot
from tests.fakes.scenes import GIB, busy, gpu, history, requests, worker

_SHARE = DeviceShare(
    device="cuda:0",
    layers=32,
    weights_bytes=int(9.4 * GIB),
    kv_bytes=int(6.1 * GIB),
    working_bytes=int(1.2 * GIB),
)


def crowded(**changes: Any) -> Snapshot:
    """Requests wait though there is room in the cache, answers reach the context, and a third card stands empty."""
    cut = [
        msgspec.structs.replace(row, prompt_tokens=7900, output_tokens=292, max_tokens=292)
        if row.finish == "length"
        else row
        for row in requests()
    ]
    waiting = tuple(msgspec.structs.replace(second, queued=18, running=16) for second in history())
    values: dict[str, Any] = {
        "devices": (
            gpu(0),
            gpu(1),
            gpu(
                2,
                utilisation=0.0,
                weights_bytes=0,
                kv_bytes=0,
                work_bytes=0,
                free_bytes=int(22.5 * GIB),
                power_w=31.0,
                temperature_c=34.0,
            ),
        ),
        "workers": tuple(worker(index, active=8, used=(_SHARE,)) for index in range(2)),
        "requests": tuple(cut),
        "queued": 18,
        "running": 16,
        "history": waiting,
    }
    return busy(**(values | changes))
