"""Harmful readings of devices, and alerts of them: Xid and ECC errors, and clocks lowered to protect it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.metrics.alerts import AlertLog
from engine.snapshot import DeviceReading

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

    def __init__(self, alerts: AlertLog) -> None:
        self._alerts = alerts
        self._xids: dict[str, tuple[int, ...]] = {}
        self._ecc: dict[str, int] = {}
        self._throttled: set[str] = set()

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
                    device.id,
                    f"{device.name} reported Xid {xids[-1]}",
                    advice="See NVIDIA's list of Xid errors. After 48, 79, 94 or 95, reset or replace the GPU.",
                )
            self._xids[device.id] = xids
        if ecc is not None:
            before = self._ecc.get(device.id)
            if before is not None and ecc > before:
                self._alerts.add(
                    "ecc_error",
                    device.id,
                    f"{device.name}: {ecc - before} uncorrected ECC errors",
                    advice="Restart its workers. If it happens again, reset or replace the GPU.",
                )
            self._ecc[device.id] = ecc

    def _look_at_clock(self, device: DeviceReading) -> None:
        reasons = harmful_throttling(device)
        if reasons and device.id not in self._throttled:
            degrees = "" if device.temperature_c is None else f" at {device.temperature_c:.0f} °C"
            self._alerts.add(
                "throttled",
                device.id,
                f"{device.name} lowers its clock{degrees}: {', '.join(reasons)}",
                advice="Improve its cooling and power supply, or lower its power limit.",
                level="warning",
            )
        if reasons:
            self._throttled.add(device.id)
        else:
            self._throttled.discard(device.id)
