"""Peak throughput of this machine's processor: measured once, on demand, and kept in a file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.devices.cpu_and_ram import cpu_name, usable_cores
from engine.doctor.inspection import ProbeFailed
from engine.doctor.probe import ask
from engine.errors import EngineError
from engine.snapshot import DeviceLimits
from engine.system.files import replace_file

MEASURE_TIMEOUT_S = 120.0
_FILE = "limits.json"
_log = logging.getLogger("engine")


def measure_cpu(cancelled: Callable[[], bool] = lambda: False) -> DeviceLimits:
    """Measure the peak throughput of this machine's processor on all cores, in a child process. Blocks for seconds.

    Raises EngineError with the reason where it fails.
    """
    try:
        return ask(
            DeviceLimits,
            str(usable_cores()),
            module="engine.devices.measure",
            timeout_s=MEASURE_TIMEOUT_S,
            cancelled=cancelled,
        )
    except ProbeFailed as error:
        raise EngineError(f"CPU peak could not be measured: {error}") from None


class LimitsFile:
    """Measured limits in a folder, by processor: a folder may be carried to another machine. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def read(self) -> DeviceLimits | None:
        """Those of this machine's processor; None where they were not measured."""
        return self._all().get(_this_cpu())

    def write(self, limits: DeviceLimits) -> None:
        """Keep them. A file that cannot be written is only logged: they can be measured again."""
        try:
            replace_file(self._file, msgspec.json.encode({**self._all(), _this_cpu(): limits}))
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._file, error)

    def _all(self) -> dict[str, DeviceLimits]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, DeviceLimits])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and is replaced: %s", self._file, error)
            return {}


def _this_cpu() -> str:
    return f"{cpu_name()}, {usable_cores()} usable"
