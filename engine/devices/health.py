"""Harmful readings of devices and disks, and alerts of them: Xid and ECC errors, lowered clocks, and slow writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.metrics.alerts import AlertLog
from engine.snapshot import Alert, DeviceReading
from engine.system.slow_disk import SlowWrite, WriteWatch
from engine.text.device_names import device_label

_log = logging.getLogger("engine")

HARMFUL_THROTTLING = frozenset(
    {"hardware slowdown", "temperature", "temperature (hardware)", "power brake", "reliability"}
)
"""Reasons of a lowered clock that name a fault or too little cooling. A power limit, or clocks that an operator set,
are how the device is meant to run."""


def harmful_throttling(device: DeviceReading) -> tuple[str, ...]:
    """Return the harmful reasons for which its clock is lowered now."""
    reasons = device.sensors.throttle_reasons if device.sensors is not None else None
    return tuple(reason for reason in reasons or () if reason in HARMFUL_THROTTLING)


class DeviceWatch:
    """Adds an alert where a device reports something harmful that it did not report before."""

    def __init__(self, alerts: AlertLog, clock: Callable[[], float] = time.time) -> None:
        self._alerts = alerts
        self._clock = clock
        self._xids: dict[str, tuple[int, ...]] = {}
        self._ecc: dict[str, int] = {}
        self._throttled: dict[str, Alert] = {}

    def look(self, devices: Iterable[DeviceReading]) -> None:
        """Compare the readings with the last ones."""
        for device in devices:
            if device.sensors is None:
                continue
            self._look_at_errors(device)
            self._look_at_clock(device)

    def _look_at_errors(self, device: DeviceReading) -> None:
        assert device.sensors is not None
        xids, ecc = device.sensors.xid_errors, device.sensors.ecc_errors
        if xids is not None:
            if xids != self._xids.get(device.id, ()) and xids:
                self._alerts.add(
                    "xid_error",
                    device_label(device),
                    f"{device_label(device)} reported Xid {xids[-1]}",
                    done="Its workers continue while they can.",
                    advice="See NVIDIA's list of Xid errors. After 48, 79, 94 or 95, reset or replace the GPU.",
                )
            self._xids[device.id] = xids
        if ecc is not None:
            before = self._ecc.get(device.id)
            if before is not None and ecc > before:
                self._alerts.add(
                    "ecc_error",
                    device_label(device),
                    f"{device_label(device)}: {ecc - before} uncorrected ECC errors",
                    done="Its workers continue: their results may be wrong.",
                    advice="Restart its workers. If it happens again, reset or replace the GPU.",
                )
            self._ecc[device.id] = ecc

    def _look_at_clock(self, device: DeviceReading) -> None:
        reasons, label = harmful_throttling(device), device_label(device)
        if reasons and device.id not in self._throttled:
            degrees = "" if device.temperature_c is None else f" at {device.temperature_c:.0f} °C"
            self._throttled[device.id] = self._alerts.add(
                "throttled",
                label,
                f"{label} lowers its clock{degrees}: {', '.join(reasons)}",
                done="Its workers continue at that clock.",
                advice="Improve its cooling and power supply, or lower its power limit.",
                level="warning",
            )
        elif not reasons and (alert := self._throttled.pop(device.id, None)) is not None:
            lasted_s = self._clock() - alert.last_at
            self._alerts.add_done(alert.id, f"Its clock was free again after {lasted_s:.0f} s.")


class DiskWatch:
    """Adds an alert where writes of a file become slow, and says when they are fast again."""

    def __init__(self, alerts: AlertLog, writes: WriteWatch) -> None:
        self._alerts = alerts
        self._writes = writes
        self._slow: dict[Path, int] = {}

    def look(self) -> None:
        """Take the slow writes since the last time."""
        slow = self._writes.take()
        for path in [path for path in self._slow if path not in slow]:
            self._alerts.add_done(self._slow.pop(path), "Its writes are fast again.")
        for path, write in slow.items():
            if path not in self._slow:
                self._slow[path] = self._add(path, write).id

    def _add(self, path: Path, write: SlowWrite) -> Alert:
        sentence = f"A write to {path} takes {write.seconds:.1f} s"
        if not write.seconds:
            sentence = f"{path} is written too slowly; lost lines: {write.lost}"
        _log.warning("%s", sentence)
        return self._alerts.add(
            "slow_disk",
            str(path),
            sentence,
            done="Requests are not delayed.",
            advice="Move the file to a local SSD, or see what else uses the disk.",
            level="warning",
        )
