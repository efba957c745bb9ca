"""Devices: every reading of each; n/a where the device does not give it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.adviser.thresholds import HOT_C
from console.text import device_label
from console.tui.screens.base import Dialog
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from engine.devices.health import harmful_throttling
from engine.snapshot import DeviceReading, DeviceSensors, ProcessMemory

_LABEL = 14
_ABSENT = ("n/a", "$muted")
_NONE = DeviceSensors()


class DevicesScreen(Dialog[None]):
    """A page that scrolls, a block for each device."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,d", "dismiss", "Close", id="devices.close", tooltip="Close the devices", key_display="esc"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._shown = Content("")

    def compose(self) -> ComposeResult:
        """The blocks."""
        with VerticalScroll(classes="dialog devices") as page:
            page.border_title = "Devices"
            yield Static(id="device-list", markup=False)

    def on_mount(self) -> None:
        """Never a first frame without them."""
        self.redraw()

    def show_view(self, view: View) -> None:
        """Draw the blocks again, where anything changed."""
        shown = for_terminal(self.app, device_blocks(view.snapshot.devices))
        if not shown.is_same(self._shown):
            self._shown = shown
            self.query_one("#device-list", Static).update(shown)


def device_blocks(devices: Sequence[DeviceReading]) -> Content:
    """A block for each device, with a blank line between two."""
    if not devices:
        return Content.styled("No device was read yet.", "$muted")
    return Content("\n\n").join(Content("\n").join(_block(device)) for device in devices)


def _block(device: DeviceReading) -> Iterator[Content]:
    simulated = "  simulated" if device.kind == "simulated" else ""
    yield Content.assemble((device_label(device), "bold $primary"), "  ", device.name, (simulated, "$warning"))
    for label, value in _rows(device):
        shown = Content.styled(*_ABSENT) if value is None else value
        yield Content.assemble((f"  {label:<{_LABEL}}", "$muted"), shown)


def _rows(device: DeviceReading) -> Iterator[tuple[str, Content | None]]:
    sensors = device.sensors or _NONE
    used = device.total_bytes - device.free_bytes
    yield (
        "utilisation",
        _joined(
            device.utilisation is not None and text.percent(device.utilisation),
            sensors.memory_utilisation is not None and f"memory interface {text.percent(sensors.memory_utilisation)}",
        ),
    )
    parts = (
        ("weights", device.weights_bytes),
        ("KV", device.kv_bytes),
        ("work", device.work_bytes),
        ("others", device.others_bytes),
    )
    parts_text = ", ".join(f"{name} {text.gib(size)}" for name, size in parts)
    yield "memory", Content(f"{text.gib(used)} of {text.gib(device.total_bytes)} GiB: {parts_text}")
    if device.kind == "cpu":
        if device.temperature_c is not None:
            yield "temperature", _temperature(device)
        yield "processes", _processes((*device.own, *device.others))
        return
    yield "power", _of(device.power_w, device.power_limit_w, "W")
    yield "temperature", _temperature(device)
    yield "SM clock", _of(sensors.sm_clock_mhz, sensors.max_sm_clock_mhz, "MHz")
    yield "memory clock", _of(sensors.memory_clock_mhz, sensors.max_memory_clock_mhz, "MHz")
    yield "throttling", _throttling(device)
    yield "PCIe", _pcie(sensors)
    yield "ECC errors", _errors(None if sensors.ecc_errors is None else str(sensors.ecc_errors), "0")
    xids = None if sensors.xid_errors is None else ", ".join(map(str, sensors.xid_errors)) or "none"
    yield "Xid errors", _errors(xids, "none")
    yield "fan", None if sensors.fan is None else Content(text.percent(sensors.fan))
    yield "processes", _processes((*device.own, *device.others))


def _joined(*parts: str | bool) -> Content | None:
    found = [part for part in parts if isinstance(part, str)]
    return Content(" · ".join(found)) if found else None


def _of(value: float | None, limit: float | None, unit: str) -> Content | None:
    if value is None:
        return None
    return Content(f"{value:,.0f} {unit}" if limit is None else f"{value:,.0f} of {limit:,.0f} {unit}")


def _temperature(device: DeviceReading) -> Content | None:
    if device.temperature_c is None:
        return None
    hot = device.temperature_c >= HOT_C
    return Content.styled(f"{device.temperature_c:.0f} °C{' hot' if hot else ''}", "$gpu-hot" if hot else "")


def _throttling(device: DeviceReading) -> Content | None:
    reasons = None if device.sensors is None else device.sensors.throttle_reasons
    if reasons is None:
        return None
    return Content.styled(", ".join(reasons) or "none", "$warning" if harmful_throttling(device) else "")


def _pcie(sensors: DeviceSensors) -> Content | None:
    generation, width = sensors.pcie_generation, sensors.pcie_width
    parts: list[str | bool] = [
        generation is not None and f"gen {generation}{_limit(sensors.max_pcie_generation)}",
        width is not None and f"x{width}{_limit(sensors.max_pcie_width)}",
    ]
    for way, value in (("in", sensors.pcie_rx_bytes_per_s), ("out", sensors.pcie_tx_bytes_per_s)):
        parts.append(value is not None and f"{way} {text.size(value)}/s")
    return _joined(*parts)


def _limit(value: int | None) -> str:
    return "" if value is None else f" of {value}"


def _errors(shown: str | None, fine: str) -> Content | None:
    return None if shown is None else Content.styled(shown, "" if shown == fine else "bold $error")


def _processes(found: Sequence[ProcessMemory]) -> Content | None:
    largest = sorted(found, key=lambda process: -process.used_bytes)
    named = [
        f"{process.name.rpartition('/')[2] or 'process'} ({process.pid}) {text.size(process.used_bytes)}"
        for process in largest
    ]
    return Content(", ".join(named)) if named else None
