"""Energy: watts integrated to joules, and what each day came to, kept in a file so that a restart forgets nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path

import msgspec

from engine.files import replace_file
from engine.snapshot import DeviceReading

MAX_GAP_S = 10.0
MAX_DAYS = 400
_FILE = "energy.json"
_log = logging.getLogger("engine")


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """What some devices draw together: watts is None where none of them tells, unmetered how many do not."""

    watts: float | None = None
    unmetered: int = 0


def power_of(readings: Iterable[DeviceReading], devices: Iterable[str]) -> Power:
    """What the devices of these ids draw now."""
    wanted = set(devices)
    drawn = {reading.id: reading.power_w for reading in readings if reading.id in wanted}
    told = [watts for watts in drawn.values() if watts is not None]
    return Power(watts=sum(told) if told else None, unmetered=len(wanted) - len(told))


class EnergyMeter:
    """Integrates power over time, by the trapezoid rule, day by day of this machine's clock."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def read(self, at: float, watts: float | None) -> dict[str, float]:
        """Joules since the last reading by day ("2026-05-29"); at: unix time.

        Nothing where power was not known at both ends, nor over a gap in which the machine may have slept.
        """
        last, self._last = self._last, None if watts is None else (at, watts)
        if last is None or watts is None:
            return {}
        before, watts_before = last
        if not 0 < at - before <= MAX_GAP_S:
            return {}
        mean = (watts_before + watts) / 2
        midnight = _midnight_after(before)
        if at <= midnight:
            return {day_of(before): mean * (at - before)}
        return {day_of(before): mean * (midnight - before), day_of(at): mean * (at - midnight)}


def summed(days: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Joules by day, both together."""
    return {day: days.get(day, 0.0) + more.get(day, 0.0) for day in {**days, **more}}


def day_of(at: float) -> str:
    """The day of unix time `at` where this machine is."""
    return datetime.fromtimestamp(at).date().isoformat()


def _midnight_after(at: float) -> float:
    tomorrow: date = datetime.fromtimestamp(at).date() + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day).timestamp()


class EnergyFile:
    """Joules by day in a folder; several engines may add to one. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def read(self) -> dict[str, float]:
        """All days that are kept; none where there is no file, or none that can be read."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and is begun anew: %s", self._file, error)
            return {}

    def add(self, joules: Mapping[str, float]) -> dict[str, float]:
        """Add to days, and give what they come to; raises OSError where it cannot be written."""
        kept = dict(sorted(summed(self.read(), joules).items())[-MAX_DAYS:])
        replace_file(self._file, msgspec.json.encode(kept))
        return kept
