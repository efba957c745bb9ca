"""Devices as lines: how busy each is and was, and what holds its memory, in forms from four rows to half a row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from textual.content import Content

from console.adviser.thresholds import HOT_C
from console.widgets import text
from console.widgets.bars import Part, meter, spark, stack
from console.widgets.device_legend import KINDS, folded, legend, numbered
from console.widgets.names import reading_name
from console.widgets.plot import columns
from engine.snapshot import DeviceReading, ProcessMemory, Second

SPAN_S = 120
_LABEL = 7
_GAP = 2
_LEAST_SPARK = 8
_LEAST_BARS = 14


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn and how. history: shares of utilisation and memory, in the order of the devices.

    letters: tell what holds memory by letters, where colours cannot.
    """

    devices: Sequence[DeviceReading]
    width: int
    history: Sequence[Second] = ()
    ascii_only: bool = False
    letters: bool = False

    @property
    def names(self) -> int:
        """Cells of the longest name."""
        return max((len(reading_name(device)) for device in self.devices), default=0)

    def past(self, index: int, width: int, of: Callable[[Second], Sequence[float | None]]) -> list[float | None]:
        """What was of device `index` in the last SPAN_S seconds, in `width` columns, or in as many seconds."""

        def share(second: Second) -> float | None:
            shares = of(second)
            return shares[index] if index < len(shares) else None

        return columns(self.history, width, max(1, -(-SPAN_S // max(1, width))), share)

    def utilisation(self, index: int, width: int) -> Content:
        """How busy it was, against 100%."""
        return spark(self.past(index, width, _utilisation), "$gpu-use", ascii_only=self.ascii_only)

    def memory(self, index: int, width: int) -> Content:
        """How full it was, against its total."""
        return spark(self.past(index, width, _memory), "$gpu-weights", ascii_only=self.ascii_only)

    def bar(self, device: DeviceReading, width: int) -> Content:
        """What holds its memory, side by side."""
        parts = [Part(float(kind.size(device)), kind.style, kind.letter) for kind in KINDS]
        return stack(parts, width, ascii_only=self.letters)


def _utilisation(second: Second) -> Sequence[float | None]:
    return second.device_utilisation


def _memory(second: Second) -> Sequence[float | None]:
    return second.device_memory


# -- forms ------------------------------------------------------------------------------------------------------------


def detailed(panel: Panel) -> list[Content]:
    """Name and readings, utilisation, memory, legend; an empty row between devices. The processor has one row where
    there are cards to look at."""
    cards = [at for at, device in enumerate(panel.devices) if device.kind != "cpu"]
    shown = cards or range(len(panel.devices))
    legends = {at: numbered(panel.devices[at], panel.width, letters=panel.letters) for at in shown}
    indent = max(0, min(_LABEL, panel.width - max((legend.cell_length for legend in legends.values()), default=0)))
    label = max(_LABEL, panel.names + 2)
    lines: list[Content] = []
    for at, device in enumerate(panel.devices):
        if lines:
            lines.append(Content(""))
        if at in legends:
            lines += [*_detail(panel, at, label), legends[at].pad_left(indent)]
        else:
            lines.append(_row(panel, device, panel.width))
    return lines


def brief(panel: Panel, *, numbers: bool = False) -> list[Content]:
    """One row each, and the legend. numbers: a legend with its numbers below each, where it has room in one row; one
    device alone always has its own."""
    rows = [_row(panel, device, panel.width) for device in panel.devices]
    legends = [folded(device, panel.names + 1, panel.width, letters=panel.letters) for device in panel.devices]
    if len(panel.devices) == 1 or (numbers and all(len(lines) == 1 for lines in legends)):
        return [line for row, lines in zip(rows, legends, strict=True) for line in (row, *lines)]
    colours = legend(panel.width, letters=panel.letters)
    return [*rows, colours.pad_left(max(0, min(panel.names + 1, panel.width - colours.cell_length)))] if rows else []


def paired(panel: Panel) -> list[Content]:
    """Two devices in each row, without their temperature and power."""
    room = (panel.width - _GAP) // 2
    cells = [
        _row(panel, msgspec.structs.replace(device, temperature_c=None, power_w=None), room) for device in panel.devices
    ]
    return [Content(" " * _GAP).join(cells[at : at + 2]) for at in range(0, len(cells), 2)]


def table(panel: Panel, *, numbers: bool = False) -> list[Content]:
    """One row each with what it was, is and holds. numbers: GiB of each kind in columns, under a head that is the
    legend too."""
    readings = [Content("  ").join(_readings(device)) for device in panel.devices]
    beside = max((each.cell_length for each in readings), default=0)
    held = max((len(_held(device)) for device in panel.devices), default=0)
    fixed = panel.names + 1 + len(" 100%") + _GAP + 1 + held + len(" GiB") + (beside + _GAP if beside else 0)
    room = max(
        _LEAST_SPARK + 8,
        panel.width - fixed - (_GAP - 1 + sum(1 + kind.cells(panel.letters) for kind in KINDS) if numbers else 0),
    )
    past = max(_LEAST_SPARK, min(2 * _LEAST_SPARK + 4, room * 2 // 5))
    lines = [_head(panel, past, room - past, held)] if numbers else []
    for at, (device, reading) in enumerate(zip(panel.devices, readings, strict=True)):
        lines.append(
            Content.assemble(
                (f"{reading_name(device):<{panel.names}} ", "bold $foreground"),
                panel.utilisation(at, past),
                (f" {text.percent(device.utilisation):>4}", "bold $foreground"),
                " " * _GAP,
                panel.bar(device, room - past),
                (f" {_held(device):>{held}}", "bold $foreground"),
                (" GiB", "$muted"),
                _numbers(device, panel.letters) if numbers else "",
                " " * (_GAP + beside - reading.cell_length) if beside else "",
                reading,
            )
        )
    return lines


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


# -- rows -------------------------------------------------------------------------------------------------------------


def _detail(panel: Panel, at: int, label: int) -> list[Content]:
    device, width = panel.devices[at], panel.width
    readings = Content("   ").join(_readings(device))
    name = text.clip(device.name, width - label - readings.cell_length - 1)
    title = Content.assemble((f"{reading_name(device):<{label}}", "bold $foreground"), (name, "$muted"))
    held = f"{_held(device)} GiB"
    past = max(_LEAST_SPARK, (width - _LABEL - len(held) - 2) // 3) if panel.history else 0
    room = max(_LEAST_SPARK, width - _LABEL - len(held) - 1 - (past + 1 if past else 0))
    gap = " " if past else ""
    return [
        Content.assemble(title, " " * max(1, width - title.cell_length - readings.cell_length), readings),
        Content.assemble(
            (f"{'use':<{_LABEL}}", "$muted"),
            meter(device.utilisation, room, "$gpu-use"),
            gap,
            panel.utilisation(at, past),
            (f" {text.percent(device.utilisation):>{len(held)}}", "bold $foreground"),
        ),
        Content.assemble(
            (f"{'memory':<{_LABEL}}", "$muted"),
            panel.bar(device, room),
            gap,
            panel.memory(at, past),
            (f" {held}", "bold $foreground"),
        ),
    ]


def _row(panel: Panel, device: DeviceReading, width: int) -> Content:
    held = _held(device)
    fixed = panel.names + 1 + len(" 100%  ") + len(f" {held} GiB")
    found = _readings(device, brief=True)
    while found and fixed + sum(reading.cell_length + 2 for reading in found) + _LEAST_BARS > width:
        found.pop()
    readings = Content(" ").join(found)
    room = max(8, width - fixed - (readings.cell_length + 2 if readings else 0))
    level = max(3, room // 3)
    return Content.assemble(
        (f"{reading_name(device):<{panel.names}} ", "bold $foreground"),
        meter(device.utilisation, level, "$gpu-use"),
        (f" {text.percent(device.utilisation):>4}  ", "bold $foreground"),
        panel.bar(device, room - level),
        (f" {held}", "bold $foreground"),
        (" GiB", "$muted"),
        "  " if readings else "",
        readings,
    )


def _head(panel: Panel, past: int, bar: int, held: int) -> Content:
    before = panel.names + 1
    title = f"{'':<{before}}{'busy, 2 min':<{past + len(' 100%') + _GAP}}{'memory':<{bar + 1 + held + len(' GiB')}}"
    letters = panel.letters
    kinds = [Content.assemble((kind.sign(letters, ""), kind.style), (kind.label, "$muted")) for kind in KINDS]
    placed = [one.pad_left(1 + kind.cells(letters) - one.cell_length) for kind, one in zip(KINDS, kinds, strict=True)]
    return Content.assemble((title, "$muted"), " " * (_GAP - 1), *placed)


def _numbers(device: DeviceReading, letters: bool) -> Content:
    cells = [f" {text.gib(kind.size(device)):>{kind.cells(letters)}}" for kind in KINDS]
    return Content(" " * (_GAP - 1) + "".join(cells))


def _held(device: DeviceReading) -> str:
    """ " 4.1/24.0", as wide as it can become."""
    total = text.gib(device.total_bytes)
    return f"{text.gib(device.total_bytes - device.free_bytes)}/{total}".rjust(2 * len(total) + 1)


def _readings(device: DeviceReading, *, brief: bool = False) -> list[Content]:
    found: list[Content] = []
    if device.temperature_c is not None:
        hot = device.temperature_c >= HOT_C
        found.append(Content.styled(f"{device.temperature_c:.0f}°C{' hot' if hot else ''}", "$gpu-hot" if hot else ""))
    if device.power_w is not None:
        limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w is not None and not brief else ""
        found.append(Content(f"{device.power_w:.0f}{limit} W"))
    return found


def _stranger(device: str, process: ProcessMemory) -> Content:
    name = process.name.rpartition("/")[2] or "process"
    held = f" {text.size(process.used_bytes)}" if process.used_bytes else ""
    return Content.assemble(f"{text.clip(name, 20)} ({process.pid})", (f"{held} on {device}", "$muted"))
