"""The face of whatever reads devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from engine.snapshot import DeviceReading


class DeviceProbe(Protocol):
    """Reads devices. Blocking; called on a thread of its own, never twice at once."""

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """Every device now. work_bytes is all that the processes `pids` hold there, weights and KV pages included;
        the rest in use is others_bytes."""
