"""What the processor draws, by the energy counters of its packages (RAPL, as Linux shows them in powercap).

Since 2020 only root may read them on most machines; then it is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("/sys/class/powercap")


class _Counter(NamedTuple):
    """Microjoules of a package at a moment; begins at 0 again after `range_uj`."""

    energy_uj: int
    range_uj: int


class PackagePower:
    """Follows the counters of all packages; memory and the rest of the machine are left out."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _is_package(zone)]
        self._last: tuple[float, Sequence[_Counter]] | None = None

    def watts(self, now_s: float) -> float | None:
        """On average since the last call; None at the first, and where the counters cannot be read."""
        counters = [_read(zone) for zone in self._zones]
        known = [counter for counter in counters if counter is not None]
        last, self._last = self._last, (now_s, known) if known and len(known) == len(counters) else None
        if last is None or self._last is None or now_s <= last[0]:
            return None
        grown_uj = sum(
            (counter.energy_uj - before.energy_uj) % (counter.range_uj + 1)
            for before, counter in zip(last[1], known, strict=True)
        )
        return grown_uj / 1e6 / (now_s - last[0])


def _is_package(zone: Path) -> bool:
    """Neither a part of a package, which it counts too, nor the whole platform."""
    try:
        return zone.name.count(":") == 1 and (zone / "name").read_text(encoding="ascii").startswith("package")
    except (OSError, UnicodeDecodeError):
        return False


def _read(zone: Path) -> _Counter | None:
    try:
        energy, most = ((zone / name).read_text(encoding="ascii") for name in ("energy_uj", "max_energy_range_uj"))
        return _Counter(int(energy), int(most))
    except (OSError, ValueError):
        return None
