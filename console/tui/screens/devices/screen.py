"""Devices: every reading of each, n/a where the device does not give it, and the energy of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.adviser.thresholds import HOT_C
from console.text import device_label
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.plot import meter
from engine.devices.health import harmful_throttling
from engine.snapshot import DeviceReading, DeviceSensors, DeviceWork, Snapshot

_LABEL = 14
_BAR = 24
_MAX_PROCESSES, _NAME_CELLS = 8, 32
_ABSENT = ("n/a", "$muted")
_NONE = DeviceSensors()


class DevicesScreen(Dialog[None]):
    """A page that scrolls, a block for each device."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "l",
            "measure",
            "Measure CPU peak",
            id="devices.measure",
            mutates=True,
            tooltip="Measure peak CPU throughput (uses all cores for a few seconds)",
        ),
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
        shown = for_terminal(self.app, device_blocks(view.snapshot))
        if not shown.is_same(self._shown):
            self._shown = shown
            self.query_one("#device-list", Static).update(shown)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to measure while no request is there to be slowed down."""
        return super().key_states(view) | {"devices.measure": not view.published.running + view.published.queued}

    def action_measure(self) -> None:
        """Measure the peak of the processor, against which its work is shown."""
        if self.console.view.published.running + self.console.view.published.queued:
            self.notify("Peak CPU throughput can be measured only while no request is running.", severity="warning")
            return
        self.notify("Measuring peak CPU throughput takes a few seconds.", markup=False)
        self.console.perform(self.console.link.insight.measure(), done="Peak CPU throughput measured")


def device_blocks(snapshot: Snapshot) -> Content:
    """A block for each device and one for energy, with a blank line between two."""
    if not snapshot.devices:
        return Content.styled("No device data yet", "$muted")
    work = {each.device: each for each in snapshot.insight.work}
    blocks = [*(_block(device, work.get(device.id)) for device in snapshot.devices), _energy(snapshot)]
    return Content("\n\n").join(Content("\n").join(block) for block in blocks)


def _block(device: DeviceReading, work: DeviceWork | None) -> Iterator[Content]:
    simulated = "  simulated" if device.kind == "simulated" else ""
    yield Content.assemble((device_label(device), "bold $primary"), "  ", device.name, (simulated, "$warning"))
    for label, value in _rows(device, work):
        shown = Content.styled(*_ABSENT) if value is None else value
        yield _row(label, shown)


def _row(label: str, value: Content) -> Content:
    return Content.assemble((f"  {label:<{_LABEL}}", "$muted"), value)


def _energy(snapshot: Snapshot) -> Iterator[Content]:
    """Power of the devices with a worker, energy of a token, and today's energy and cost."""
    seen, session = snapshot.insight.energy, snapshot.insight.session
    yield Content.styled("Energy", "bold $primary")
    if seen.power_w is None:
        yield _row("now", Content("power not reported by this device" if seen.unmetered else "no device in use"))
    else:
        per_watt = snapshot.output_tokens_per_s / seen.power_w if seen.power_w else 0.0
        yield _row("now", Content(f"{seen.power_w:,.0f} W · {text.three_digits(per_watt)} tok/s per W"))
    if seen.session_joules:
        per_token = seen.busy_joules / session.output_tokens if session.output_tokens else None
        joules = "" if per_token is None else f"{text.three_digits(per_token)} J per token while busy · "
        yield _row("session", Content(f"{joules}{text.energy(seen.session_joules)}"))
    if seen.session_joules or seen.today_joules:
        money = "" if seen.rate_per_kwh is None else text.cost(seen.today_joules, seen.rate_per_kwh, seen.currency)
        yield _row("today", Content(text.energy(seen.today_joules) + (f" · {money}" if money else "")))
    if seen.unmetered and seen.power_w is not None:
        yield _row("", Content(f"{text.plural(seen.unmetered, 'device')} in use without power reading, not included"))


def _rows(device: DeviceReading, work: DeviceWork | None) -> Iterator[tuple[str, Content | None]]:
    sensors = device.sensors or _NONE
    used = device.total_bytes - device.free_bytes
    yield (
        "utilisation",
        _joined(
            device.utilisation is not None and text.percent(device.utilisation),
            sensors.memory_utilisation is not None and f"memory interface {text.percent(sensors.memory_utilisation)}",
        ),
    )
    if work is not None:
        peak = _unknown_peak(device)
        yield "compute", _against_peak(work.flops_per_s, work.flops_limit_per_s, "FLOP/s", peak)
        yield "bandwidth", _against_peak(work.bytes_per_s, work.bytes_limit_per_s, "B/s", peak)
    parts = (
        ("weights", device.weights_bytes),
        ("KV", device.kv_bytes),
        ("work", device.work_bytes),
        ("others", device.others_bytes),
    )
    parts_text = ", ".join(f"{name} {text.gib(size)}" for name, size in parts)
    yield "memory", Content(f"{text.gib(used)} of {text.gib(device.total_bytes)} GiB: {parts_text}")
    if device.kind == "cpu":
        yield "temperature", _temperature(device)
        yield from _processes(device)
        return
    yield "power", _of(device.power_w, device.power_limit_w, "W")
    yield "temperature", _temperature(device)
    yield "SM clock", _of(sensors.sm_clock_mhz, sensors.max_sm_clock_mhz, "MHz")
    yield "memory clock", _of(sensors.memory_clock_mhz, sensors.max_memory_clock_mhz, "MHz")
    yield "throttling", _throttling(device)
    yield "PCIe", _pcie(sensors)
    yield "NVLink", _nvlink(sensors)
    yield "ECC errors", _errors(None if sensors.ecc_errors is None else str(sensors.ecc_errors), "0")
    xids = None if sensors.xid_errors is None else ", ".join(map(str, sensors.xid_errors)) or "none"
    yield "Xid errors", _errors(xids, "none")
    yield "fan", None if sensors.fan is None else Content(text.percent(sensors.fan))
    yield from _processes(device)


def _against_peak(value: float, peak: float | None, unit: str, unknown: str) -> Content:
    """Return the work of the workers on a device, as a share of its peak where that is known."""
    if peak is None:
        return Content.assemble(text.with_si_prefix(value, unit), (f"  {unknown}", "$muted"))
    bar = meter(value / peak, _BAR, "$graph-tokens" if unit == "FLOP/s" else "$gpu-kv")
    return Content.assemble(bar, (f"{value / peak:>5.0%}", "bold"), f"  {text.of_limit(value, peak, unit)}")


def _unknown_peak(device: DeviceReading) -> str:
    if device.kind == "simulated":
        return "simulated"
    return "peak not measured" if device.id == "cpu" else "peak not known"


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
    return _joined(*parts, *_traffic(sensors.pcie_rx_bytes_per_s, sensors.pcie_tx_bytes_per_s))


def _nvlink(sensors: DeviceSensors) -> Content | None:
    links = sensors.nvlink_links
    if links is None:
        return None
    return _joined(
        f"{links}{_limit(sensors.max_nvlink_links)} links",
        *_traffic(sensors.nvlink_rx_bytes_per_s, sensors.nvlink_tx_bytes_per_s),
    )


def _traffic(received: float | None, sent: float | None) -> Iterator[str]:
    for way, value in (("in", received), ("out", sent)):
        if value is not None:
            yield f"{way} {text.size(value)}/s"


def _limit(value: int | None) -> str:
    return "" if value is None else f" of {value}"


def _errors(shown: str | None, fine: str) -> Content | None:
    return None if shown is None else Content.styled(shown, "" if shown == fine else "bold $error")


def _processes(device: DeviceReading) -> Iterator[tuple[str, Content | None]]:
    """A row for each process with memory there, the largest first."""
    found = sorted((*device.own, *device.others), key=lambda process: -process.used_bytes)
    if not found:
        yield "processes", None
    for at, process in enumerate(found[:_MAX_PROCESSES]):
        size = text.size(process.used_bytes) if process.used_bytes else _ABSENT[0]
        name = text.clip(process.name.rpartition("/")[2] or "process", _NAME_CELLS)
        whose = ("  worker", "$muted") if process in device.own else ""
        yield ("" if at else "processes"), Content.assemble(f"{size:>9}  {process.pid:>7}  {name}", whose)
    if (more := len(found) - _MAX_PROCESSES) > 0:
        yield "", Content.styled(f"and {more} more", "$muted")
