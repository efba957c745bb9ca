"""Devices: how busy each one is and what holds its memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from console.widgets import text
from console.widgets.bars import Part, meter, stack
from console.widgets.glyphs import fitted, is_ascii
from console.widgets.names import reading_name
from engine.snapshot import DeviceReading, ProcessMemory

HOT_C = 85.0
_FEW = 2
_DETAILED_WIDTH = 56
_PAIRED_WIDTH = 72
_LABEL = 7
_LEAST_BARS = 14


class DevicesPanel(Widget):
    """Four rows for each of up to two devices where there is room, else one or half a row each and one legend."""

    DEFAULT_CSS = """
    DevicesPanel { height: auto; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "Devices"
        self._devices: tuple[DeviceReading, ...] = ()

    def show(self, devices: tuple[DeviceReading, ...]) -> None:
        """Draw anew, where anything changed."""
        if devices == self._devices:
            return
        resized = len(devices) != len(self._devices) or [d.others for d in devices] != [d.others for d in self._devices]
        self._devices = devices
        self.border_title = title(devices)
        self.refresh(layout=resized)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as there are lines."""
        return max(1, len(self._lines(width)))

    def render(self) -> Content:
        """All lines."""
        return Content("\n").join(self._lines(self.size.width))

    def _lines(self, width: int) -> list[Content]:
        ascii_only = is_ascii(self.app)
        many, tall = len(self._devices) > _FEW, self.screen.has_class("-tall")
        if not many and tall and width >= _DETAILED_WIDTH:
            lines = detailed(self._devices, width, ascii_only=ascii_only)
        elif many and not tall and width >= _PAIRED_WIDTH:
            lines = paired(self._devices, width, ascii_only=ascii_only)
        else:
            lines = brief(self._devices, width, ascii_only=ascii_only)
        if not self.screen.has_class("-short"):
            lines += strangers(self._devices, width)
        return [fitted(self.app, line) for line in lines]


def title(devices: Sequence[DeviceReading]) -> str:
    """The frame's: that devices are simulated stands there in every form."""
    cards = [device for device in devices if device.kind != "cpu"]
    simulated = sum(device.kind == "simulated" for device in cards)
    if not simulated:
        return "Devices"
    return "Devices (simulated)" if simulated == len(cards) else f"Devices ({simulated} of {len(cards)} simulated)"


def detailed(devices: Sequence[DeviceReading], width: int, *, ascii_only: bool = False) -> list[Content]:
    """Name and readings, utilisation, memory, legend; an empty row between devices."""
    legends = [_legend(device, width) for device in devices]
    indent = max(0, min(_LABEL, width - max((legend.cell_length for legend in legends), default=0)))
    label = max((len(reading_name(device)) for device in devices), default=0) + 2
    lines: list[Content] = []
    for device, legend in zip(devices, legends, strict=True):
        if lines:
            lines.append(Content(""))
        lines += [*_detail(device, width, max(_LABEL, label), ascii_only), legend.pad_left(indent)]
    return lines


def brief(devices: Sequence[DeviceReading], width: int, *, ascii_only: bool = False) -> list[Content]:
    """One row each, and the legend: with the numbers where there is one device."""
    names = max((len(reading_name(device)) for device in devices), default=0)
    lines = [_row(device, names, width, ascii_only) for device in devices]
    if not devices:
        return lines
    if len(devices) > 1:
        colours = _colours(width)
        return [*lines, colours.pad_left(max(0, min(names + 1, width - colours.cell_length)))]
    indent = " " * (names + 1)
    parts = _legend_parts(devices[0])
    whole = Content("  ").join(parts)
    if whole.cell_length + len(indent) <= width:
        return [*lines, Content.assemble(indent, whole)]
    return [*lines, *(Content.assemble(indent, Content("  ").join(half)) for half in (parts[:3], parts[3:]))]


def paired(devices: Sequence[DeviceReading], width: int, *, ascii_only: bool = False) -> list[Content]:
    """Two devices in each row, without their temperature and power; the legend last."""
    names = max((len(reading_name(device)) for device in devices), default=0)
    room = (width - 2) // 2
    cells = [
        _row(msgspec.structs.replace(device, temperature_c=None, power_w=None), names, room, ascii_only)
        for device in devices
    ]
    return [*(Content("  ").join(cells[at : at + 2]) for at in range(0, len(cells), 2)), _colours(width)]


_PARTS = (
    ("weights", "weights_bytes", "$gpu-weights", "■"),
    ("KV", "kv_bytes", "$gpu-kv", "■"),
    ("work", "work_bytes", "$gpu-work", "■"),
    ("others", "others_bytes", "$gpu-others", "■"),
    ("free", "free_bytes", "$gpu-free", "□"),
)
_LETTERS = ("w", "k", "o", "x", ".")


def _parts(device: DeviceReading) -> list[Part]:
    values = (getattr(device, field) for _, field, _, _ in _PARTS)
    return [
        Part(float(value), style, letter)
        for value, (_, _, style, _), letter in zip(values, _PARTS, _LETTERS, strict=True)
    ]


def _detail(device: DeviceReading, width: int, label: int, ascii_only: bool) -> list[Content]:
    readings = Content("   ").join(_readings(device))
    name = text.clip(device.name, width - label - readings.cell_length - 1)
    title = Content.assemble((f"{reading_name(device):<{label}}", "bold $foreground"), (name, "$muted"))
    used = device.total_bytes - device.free_bytes
    busy = text.percent(device.utilisation)
    total = text.gib(device.total_bytes)
    held = f"{text.gib(used)}/{total} GiB".rjust(2 * len(total) + 5)
    room = max(8, width - _LABEL - len(held) - 1)
    return [
        Content.assemble(title, " " * max(1, width - title.cell_length - readings.cell_length), readings),
        Content.assemble(
            (f"{'use':<{_LABEL}}", "$muted"),
            meter(device.utilisation, room, "$gpu-use"),
            (f" {busy:>{len(held)}}", "bold $foreground"),
        ),
        Content.assemble(
            (f"{'memory':<{_LABEL}}", "$muted"),
            stack(_parts(device), room, ascii_only=ascii_only),
            (f" {held}", "bold $foreground"),
        ),
    ]


def _legend_parts(device: DeviceReading, gap: str = " ") -> list[Content]:
    """Nobody else can hold memory of a simulated device."""
    shown = [part for part in _PARTS if device.kind != "simulated" or part[0] != "others"]
    return [
        Content.assemble((f"{mark}{gap}", style), (f"{label} ", "$muted"), text.gib(getattr(device, field)))
        for label, field, style, mark in shown
    ]


def _legend(device: DeviceReading, width: int) -> Content:
    line = _joined(_legend_parts(device), width)
    return line if line.cell_length <= width else Content(" ").join(_legend_parts(device, gap=""))


def _colours(width: int) -> Content:
    parts = [Content.assemble((f"{mark} ", style), (name, "$muted")) for name, _, style, mark in _PARTS]
    return _joined(parts, width)


def _joined(parts: Sequence[Content], width: int) -> Content:
    """Side by side, closer where there is less room."""
    wide = Content("  ").join(parts)
    return wide if wide.cell_length <= width else Content(" ").join(parts)


def _row(device: DeviceReading, names: int, width: int, ascii_only: bool) -> Content:
    total = text.gib(device.total_bytes)
    held = f"{text.gib(device.total_bytes - device.free_bytes)}/{total}".rjust(2 * len(total) + 1)
    fixed = names + 1 + len(" 100%  ") + len(f" {held} GiB")
    found = _readings(device, brief=True)
    while found and fixed + sum(reading.cell_length + 2 for reading in found) + _LEAST_BARS > width:
        found.pop()
    readings = Content(" ").join(found)
    room = max(8, width - fixed - (readings.cell_length + 2 if readings else 0))
    level = max(3, room // 3)
    return Content.assemble(
        (f"{reading_name(device):<{names}} ", "bold $foreground"),
        meter(device.utilisation, level, "$gpu-use"),
        (f" {text.percent(device.utilisation):>4}  ", "bold $foreground"),
        stack(_parts(device), room - level, ascii_only=ascii_only),
        (f" {held}", "bold $foreground"),
        (" GiB", "$muted"),
        "  " if readings else "",
        readings,
    )


def strangers(devices: Sequence[DeviceReading], width: int) -> list[Content]:
    """One row with the programs that hold the memory called others, where the driver tells; the largest first."""
    found = [
        (process.used_bytes, _stranger(reading_name(device), process))
        for device in devices
        for process in device.others
    ]
    if not found:
        return []
    named = Content(", ").join(line for _, line in sorted(found, key=lambda one: -one[0]))
    return [Content.assemble(("others: ", "$muted"), named).truncate(width, ellipsis=True)]


def _stranger(device: str, process: ProcessMemory) -> Content:
    name = process.name.rpartition("/")[2] or "process"
    held = f" {text.size(process.used_bytes)}" if process.used_bytes else ""
    return Content.assemble(f"{text.clip(name, 20)} ({process.pid})", (f"{held} on {device}", "$muted"))


def _readings(device: DeviceReading, *, brief: bool = False) -> list[Content]:
    found: list[Content] = []
    if device.temperature_c is not None:
        hot = device.temperature_c >= HOT_C
        found.append(Content.styled(f"{device.temperature_c:.0f}°C{' hot' if hot else ''}", "$gpu-hot" if hot else ""))
    if device.power_w is not None:
        limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w is not None and not brief else ""
        found.append(Content(f"{device.power_w:.0f}{limit} W"))
    return found
