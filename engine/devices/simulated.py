"""Devices that are only kept account of: workers on them compute on the CPU, within the memory that they are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.config import format_number
from engine.devices.cpu_and_ram import HostProbe
from engine.errors import InvalidRequest
from engine.snapshot import DeviceReading

MAX_DEVICES = 64
MAX_GIB = 1_000_000.0
_PREFIX = "sim:"
_FORM = "it must be sim: and the GiB of each device, such as sim:24,24"


class SimulatedProbe:
    """Devices of `gib` GiB each as "sim:0" and on, in place of the machine's GPUs, and the host, which computes.

    They are read as empty: `account` fills in what the workers say they hold there.
    """

    def __init__(self, gib: Sequence[float]) -> None:
        self._devices = simulated_readings(gib)
        self._host = HostProbe()

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The simulated devices, then the host."""
        return (*self._devices, *self._host.read(pids))


def simulated_readings(gib: Sequence[float]) -> tuple[DeviceReading, ...]:
    """Return empty simulated devices of these sizes."""
    return tuple(
        DeviceReading(
            id=f"{_PREFIX}{index}",
            name=f"Simulated {size:g} GiB",
            kind="simulated",
            utilisation=None,
            total_bytes=int(size * 2**30),
            free_bytes=int(size * 2**30),
        )
        for index, size in enumerate(gib)
    )


def parse_devices(text: str) -> tuple[float, ...]:
    """GiB of each device in "sim:24,24". Raises InvalidRequest, naming what is wrong."""
    kind, found, sizes = text.strip().partition(":")
    if not found or kind.strip() != "sim":
        raise _refused(f"devices is {text!r}; {_FORM}", text)
    gib = tuple(_gib(size.strip(), text) for size in sizes.split(","))
    if len(gib) > MAX_DEVICES:
        raise _refused(f"devices names {len(gib)} devices; {MAX_DEVICES} can be simulated at most", text)
    return gib


def _gib(size: str, text: str) -> float:
    try:
        gib = float(size)
    except ValueError:
        what = f"{size!r} is not a number of GiB" if size else "a size is missing"
        raise _refused(f"devices is {text!r}, where {what}; {_FORM}", text) from None
    if not (0 < gib <= MAX_GIB and int(gib * 2**30)):
        raise _refused(
            f"devices gives a device {format_number(gib)} GiB; it must be more than 0, max {MAX_GIB:,.0f}", text
        )
    return gib


def _refused(message: str, text: str) -> InvalidRequest:
    return InvalidRequest(message, param="devices", value=text)
