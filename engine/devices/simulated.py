"""Devices that are only kept account of: workers on them compute on the CPU, within the memory that they are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from engine.config import format_number
from engine.devices.cpu_and_ram import HostProbe
from engine.errors import InvalidRequest
from engine.snapshot import DeviceReading, DeviceSensors

MAX_DEVICES = 64
MAX_GIB = 1_000_000.0
_PREFIX = "sim:"
_EPISODE_SAMPLES, _EPISODE_EVERY, _EPISODE_APART = 8, 120, 40
"""A busy device is throttled by its temperature in 8 of 120 samples; the next device 40 samples earlier."""
_EPISODE_BUSY, _EPISODE_SPEED = 0.3, 0.7
_IDLE = DeviceSensors(
    memory_utilisation=0.0,
    sm_clock_mhz=210,
    max_sm_clock_mhz=1980,
    memory_clock_mhz=810,
    max_memory_clock_mhz=9501,
    throttle_reasons=(),
    pcie_generation=4,
    max_pcie_generation=4,
    pcie_width=16,
    max_pcie_width=16,
    pcie_rx_bytes_per_s=0.0,
    pcie_tx_bytes_per_s=0.0,
    ecc_errors=0,
    xid_errors=(),
    fan=0.3,
    nvlink_links=4,
    max_nvlink_links=4,
    nvlink_rx_bytes_per_s=0.0,
    nvlink_tx_bytes_per_s=0.0,
)
_FORM = "use sim:GIB,GIB, for example sim:24,24"


class SimulatedProbe:
    """Devices of `gib` GiB each as "sim:0" and on, in place of the machine's GPUs, and the host, which computes.

    They are read as empty and idle: `account` fills in what the workers say they hold there, and `under_load` how the
    sensors follow their work.
    """

    def __init__(self, gib: Sequence[float]) -> None:
        self._devices = simulated_readings(gib)
        self._host = HostProbe()
        self._samples = 0

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The simulated devices, then the host."""
        devices = tuple(
            msgspec.structs.replace(device, sensors=_sensors(self._samples, index))
            for index, device in enumerate(self._devices)
        )
        self._samples += 1
        return (*devices, *self._host.read(pids))


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


def _sensors(sample: int, index: int) -> DeviceSensors:
    """Those of an idle device, and whether a busy one is throttled at that sample."""
    at = (sample + 1 + _EPISODE_APART * index) % _EPISODE_EVERY
    hot = at >= _EPISODE_EVERY - _EPISODE_SAMPLES
    return msgspec.structs.replace(_IDLE, throttle_reasons=("temperature",)) if hot else _IDLE


def under_load(reading: DeviceReading, utilisation: float) -> DeviceReading:
    """Return a simulated device with its sensors as its work moves them; as it is where it has none."""
    sensors = reading.sensors
    if sensors is None:
        return reading
    hot = bool(sensors.throttle_reasons) and utilisation >= _EPISODE_BUSY
    speed = _EPISODE_SPEED if hot else 1.0
    busy = utilisation > 0
    return msgspec.structs.replace(
        reading,
        temperature_c=88.0 if hot else round(34 + 44 * utilisation),
        power_w=round(45 + 290 * utilisation * speed),
        power_limit_w=350.0,
        sensors=msgspec.structs.replace(
            sensors,
            memory_utilisation=0.6 * utilisation * speed,
            sm_clock_mhz=round(1980 * speed) if busy else sensors.sm_clock_mhz,
            memory_clock_mhz=sensors.max_memory_clock_mhz if busy else sensors.memory_clock_mhz,
            throttle_reasons=sensors.throttle_reasons if hot else (),
            pcie_rx_bytes_per_s=9e8 * utilisation,
            pcie_tx_bytes_per_s=4e8 * utilisation,
            fan=1.0 if hot else 0.3 + 0.5 * utilisation,
            nvlink_rx_bytes_per_s=2e9 * utilisation,
            nvlink_tx_bytes_per_s=2e9 * utilisation,
        ),
    )


def parse_devices(text: str) -> tuple[float, ...]:
    """GiB of each device in "sim:24,24". Raises InvalidRequest, naming what is wrong."""
    kind, found, sizes = text.strip().partition(":")
    if not found or kind.strip() != "sim":
        raise _refused(f"devices is {text!r}; {_FORM}", text)
    gib = tuple(_gib(size.strip(), text) for size in sizes.split(","))
    if len(gib) > MAX_DEVICES:
        raise _refused(f"devices names {len(gib)} devices; max {MAX_DEVICES} can be simulated", text)
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
