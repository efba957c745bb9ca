"""Devices: how busy each one is and what holds its memory, in the form that there is room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.content import Content
from textual.events import MouseMove
from textual.geometry import Size

from console import text
from console.adviser.thresholds import HOT_C
from console.text import device_label
from console.tui.screens.dashboard.panels import Place, RowsPanel
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from console.tui.widgets.graph import Graph, moment_text
from console.tui.widgets.panel import set_frame
from console.tui.widgets.plot import BarSegment, column_of, column_under, columns, meter, moment_of, spark, stack
from engine.devices.health import harmful_throttling
from engine.snapshot import DeviceReading, ProcessMemory, Second

# Legends of devices: what the colours of memory bars mean, or their letters, with and without numbers.


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """A kind of use of memory. style: a CSS variable; letter: what fills the bar in ASCII; width: of its numbers."""

    label: str
    field: str
    style: str
    mark: str
    letter: str
    width: int

    def sign(self, letters: bool, gap: str = " ") -> str:
        """Return the mark before its name in a legend; "" where its name begins with its letter and room is scarce."""
        if not letters:
            return self.mark + gap
        return "" if not gap and self.label.lower().startswith(self.letter) else f"{self.letter} "

    def cells(self, letters: bool) -> int:
        """Of its column."""
        return self.width + letters

    def size(self, device: DeviceReading) -> int:
        """Bytes of it."""
        size: int = getattr(device, self.field)
        return size


MEMORY_KINDS = (
    MemoryKind("weights", "weights_bytes", "$gpu-weights", "■", "w", 8),
    MemoryKind("KV", "kv_bytes", "$gpu-kv", "■", "k", 5),
    MemoryKind("work", "work_bytes", "$gpu-work", "■", "o", 5),
    MemoryKind("others", "others_bytes", "$gpu-others", "■", "x", 7),
    MemoryKind("free", "free_bytes", "$gpu-free", "□", ".", 5),
)


def legend(width: int, *, letters: bool = False) -> Content:
    """Return the legend of the bars' colours, or of their letters."""
    parts = [Content.assemble((kind.sign(letters), kind.style), (kind.label, "$muted")) for kind in MEMORY_KINDS]
    return _join(parts, width)


def _legend_parts(device: DeviceReading, letters: bool, gap: str = " ") -> list[Content]:
    """Return the parts of a legend; simulated devices have no memory of other programs."""
    return [
        Content.assemble(
            (kind.sign(letters, gap), kind.style),
            (f"{kind.label} ", "$muted"),
            text.gib(kind.size(device)),
        )
        for kind in MEMORY_KINDS
        if device.kind != "simulated" or kind.label != "others"
    ]


def legend_numbers(device: DeviceReading, width: int, *, letters: bool = False) -> Content:
    """With the GiB of one device, in one row."""
    line = _join(_legend_parts(device, letters), width)
    return line if line.cell_length <= width else Content(" ").join(_legend_parts(device, letters, gap=""))


def legend_lines(device: DeviceReading, indent: int, width: int, *, letters: bool = False) -> list[Content]:
    """With the GiB of one device, in one row, or in two where it is too long for one."""
    room, left = width - indent, " " * indent
    parts = _legend_parts(device, letters)
    for whole in (Content("  ").join(parts), Content(" ").join(_legend_parts(device, letters, gap=""))):
        if whole.cell_length <= room:
            return [Content.assemble(left, whole)]
    return [Content.assemble(left, Content("  ").join(half)) for half in (parts[:3], parts[3:])]


def _join(parts: Sequence[Content], width: int) -> Content:
    """Side by side, closer where there is less room."""
    wide = Content("  ").join(parts)
    return wide if wide.cell_length <= width else Content(" ").join(parts)


# Devices as lines: how busy each is and was, and what holds its memory, in forms from four rows to half a row each.

SPAN_S = 120
_LABEL = 7
_GAP = 2
_MIN_SPARK = 8
_MIN_NAME = 8
_MIN_BARS = 14


@dataclass(frozen=True, slots=True)
class Panel:
    """The devices as they are drawn. history: shares of utilisation and memory, in the order of the devices.

    letters: mark the kinds of memory by letters, where colours cannot.
    cursor: the moment (unix time) that the number after a small graph is of; None: now.
    """

    devices: Sequence[DeviceReading]
    width: int
    history: Sequence[Second] = ()
    ascii_only: bool = False
    letters: bool = False
    cursor: float | None = None

    @property
    def names(self) -> int:
        """Cells of the longest name."""
        return max((len(device_label(device)) for device in self.devices), default=0)

    def utilisation(self, index: int, width: int) -> Content:
        """How busy it was, against 100%."""
        return self._spark(index, width, _utilisation, "$gpu-use")

    def memory(self, index: int, width: int) -> Content:
        """How full it was, against its total."""
        return self._spark(index, width, _memory, "$gpu-weights")

    def busy(self, index: int, width: int) -> tuple[str, str]:
        """How busy it is, or was at the cursor in a small graph of that width; with its style."""
        if self.cursor is None or not width:
            return _busy(self.devices[index]), "bold $foreground"
        share = self._reading(index, width, _utilisation)
        return "–" if share is None else text.percent(share), "reverse"

    def used(self, index: int, width: int) -> tuple[str, str]:
        """How full it is, or was at the cursor in a small graph of that width; with its style."""
        device = self.devices[index]
        if self.cursor is None or not width:
            return _used_text(device), "bold $foreground"
        share = self._reading(index, width, _memory)
        return _of_total(device, "–" if share is None else text.gib(round(share * device.total_bytes))), "reverse"

    def _spark(self, index: int, width: int, of: _Shares, style: str) -> Content:
        """The last SPAN_S seconds in `width` columns."""
        shares = columns(self.history, width, _step(width), _share_of(index, of))
        return spark(shares, style, ascii_only=self.ascii_only, cursor=self._cursor_column(width))

    def _cursor_column(self, width: int) -> int | None:
        """Counted back from the newest."""
        if self.cursor is None or not self.history:
            return None
        return column_of(self.cursor, self.history[-1].at, _step(width))

    def _reading(self, index: int, width: int, of: _Shares) -> float | None:
        """The value at the cursor, of the whole column; also where that is further back than the columns are."""
        back = self._cursor_column(width)
        if back is None or back < 0:
            return None
        return columns(self.history, back + 1, _step(width), _share_of(index, of))[0]

    def bar(self, device: DeviceReading, width: int) -> Content:
        """Return the bar of its memory, kind by kind."""
        parts = [BarSegment(float(kind.size(device)), kind.style, kind.letter) for kind in MEMORY_KINDS]
        return stack(parts, width, ascii_only=self.letters)


_Shares = Callable[[Second], Sequence[float | None]]


def _step(width: int) -> int:
    """Seconds of a column, of `width` in a small graph."""
    return max(1, -(-SPAN_S // max(1, width)))


def _share_of(index: int, of: _Shares) -> Callable[[Second], float | None]:
    def share(second: Second) -> float | None:
        shares = of(second)
        return shares[index] if index < len(shares) else None

    return share


def _utilisation(second: Second) -> Sequence[float | None]:
    return second.device_utilisation


def _memory(second: Second) -> Sequence[float | None]:
    return second.device_memory


# -- forms ------------------------------------------------------------------------------------------------------------


def detailed_rows(panel: Panel) -> list[Content]:
    """Name and readings, utilisation, memory, legend; an empty row between devices. The processor has one row where
    there are cards to look at."""
    cards = [at for at, device in enumerate(panel.devices) if device.kind != "cpu"]
    shown = cards or range(len(panel.devices))
    legends = {at: legend_numbers(panel.devices[at], panel.width, letters=panel.letters) for at in shown}
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


def brief_rows(panel: Panel, *, numbers: bool = False) -> list[Content]:
    """One row each, and the legend. numbers: a legend with its numbers below each, where it has room in one row; one
    device alone always has its own."""
    rows = [_row(panel, device, panel.width) for device in panel.devices]
    legends = [legend_lines(device, panel.names + 1, panel.width, letters=panel.letters) for device in panel.devices]
    if len(panel.devices) == 1 or (numbers and all(len(lines) == 1 for lines in legends)):
        return [line for row, lines in zip(rows, legends, strict=True) for line in (row, *lines)]
    colours = legend(panel.width, letters=panel.letters)
    return [*rows, colours.pad_left(max(0, min(panel.names + 1, panel.width - colours.cell_length)))] if rows else []


def paired_rows(panel: Panel) -> list[Content]:
    """Two devices in each row, without their temperature and power."""
    room = (panel.width - _GAP) // 2
    cells = [_row(panel, device, room, power=False) for device in panel.devices]
    return [Content(" " * _GAP).join(cells[at : at + 2]) for at in range(0, len(cells), 2)]


def table(panel: Panel, *, numbers: bool = False) -> list[Content]:
    """One row each with what it was, is and holds. numbers: GiB of each kind in columns, under a head that is the
    legend too."""
    has_room = panel.width >= _BANDWIDTH_WIDTH
    readings = [Content("  ").join(_readings(device, bandwidth=has_room)) for device in panel.devices]
    readings_width = max((each.cell_length for each in readings), default=0)
    used = max((len(_used_text(device)) for device in panel.devices), default=0)
    fixed = (
        panel.names
        + 1
        + len(" 100%")
        + _GAP
        + 1
        + used
        + len(" GiB")
        + (readings_width + _GAP if readings_width else 0)
    )
    room = max(
        _MIN_SPARK + 8,
        panel.width
        - fixed
        - (_GAP - 1 + sum(1 + kind.cells(panel.letters) for kind in MEMORY_KINDS) if numbers else 0),
    )
    past = max(_MIN_SPARK, min(2 * _MIN_SPARK + 4, room * 2 // 5))
    lines = [_head(panel, past, room - past, used)] if numbers else []
    for at, (device, reading) in enumerate(zip(panel.devices, readings, strict=True)):
        busy, busy_style = panel.busy(at, past)
        lines.append(
            Content.assemble(
                (f"{device_label(device):<{panel.names}} ", "bold $foreground"),
                panel.utilisation(at, past),
                " ",
                (f"{busy:>4}", busy_style),
                " " * _GAP,
                panel.bar(device, room - past),
                (f" {_used_text(device):>{used}}", "bold $foreground"),
                (" GiB", "$muted"),
                _numbers(device, panel.letters) if numbers else "",
                " " * (_GAP + readings_width - reading.cell_length) if readings_width else "",
                reading,
            )
        )
    return lines


def other_processes(devices: Sequence[DeviceReading], width: int) -> list[Content]:
    """Return a row with the other programs that use memory, as far as the driver lists them; the largest first."""
    found = [
        (process.used_bytes, _stranger(device_label(device), process))
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
    readings = Content("   ").join(_readings(device, bandwidth=True))
    name_cells = width - label - readings.cell_length - 1
    name = text.clip(device.name, name_cells) if name_cells >= _MIN_NAME else ""
    title = Content.assemble((f"{device_label(device):<{label}}", "bold $foreground"), (name, "$muted"))
    cells = len(f"{_used_text(device)} GiB")
    past = max(_MIN_SPARK, (width - _LABEL - cells - 2) // 3) if panel.history else 0
    room = max(_MIN_SPARK, width - _LABEL - cells - 1 - (past + 1 if past else 0))
    gap = " " if past else ""
    (busy, busy_style), (used, used_style) = panel.busy(at, past), panel.used(at, past)
    return [
        Content.assemble(title, " " * max(1, width - title.cell_length - readings.cell_length), readings),
        Content.assemble(
            (f"{'use':<{_LABEL}}", "$muted"),
            meter(device.utilisation, room, "$gpu-use"),
            gap,
            panel.utilisation(at, past),
            " " * (1 + cells - len(busy)),
            (busy, busy_style),
        ),
        Content.assemble(
            (f"{'memory':<{_LABEL}}", "$muted"),
            panel.bar(device, room),
            gap,
            panel.memory(at, past),
            " ",
            (f"{used} GiB", used_style),
        ),
    ]


def _row(panel: Panel, device: DeviceReading, width: int, *, power: bool = True) -> Content:
    used = _used_text(device)
    fixed = panel.names + 1 + len(" 100%  ") + len(f" {used} GiB")
    found = _readings(device, brief=True, power=power)
    while found and fixed + sum(reading.cell_length + 2 for reading in found) + _MIN_BARS > width:
        found.pop()
    readings = Content(" ").join(found)
    room = max(8, width - fixed - (readings.cell_length + 2 if readings else 0))
    level = max(3, room // 3)
    return Content.assemble(
        (f"{device_label(device):<{panel.names}} ", "bold $foreground"),
        meter(device.utilisation, level, "$gpu-use"),
        (f" {_busy(device):>4}  ", "bold $foreground"),
        panel.bar(device, room - level),
        (f" {used}", "bold $foreground"),
        (" GiB", "$muted"),
        "  " if readings else "",
        readings,
    )


def _head(panel: Panel, past: int, bar: int, used: int) -> Content:
    before = panel.names + 1
    title = f"{'':<{before}}{'busy, 2 min':<{past + len(' 100%') + _GAP}}{'memory':<{bar + 1 + used + len(' GiB')}}"
    letters = panel.letters
    kinds = [Content.assemble((kind.sign(letters, ""), kind.style), (kind.label, "$muted")) for kind in MEMORY_KINDS]
    placed = [
        one.pad_left(1 + kind.cells(letters) - one.cell_length) for kind, one in zip(MEMORY_KINDS, kinds, strict=True)
    ]
    return Content.assemble((title, "$muted"), " " * (_GAP - 1), *placed)


def _numbers(device: DeviceReading, letters: bool) -> Content:
    cells = [f" {text.gib(kind.size(device)):>{kind.cells(letters)}}" for kind in MEMORY_KINDS]
    return Content(" " * (_GAP - 1) + "".join(cells))


def _used_text(device: DeviceReading) -> str:
    return _of_total(device, text.gib(device.total_bytes - device.free_bytes))


def _of_total(device: DeviceReading, used: str) -> str:
    """ " 4.1/24.0", as wide as it can become."""
    total = text.gib(device.total_bytes)
    return f"{used}/{total}".rjust(2 * len(total) + 1)


def _busy(device: DeviceReading) -> str:
    return "n/a" if device.utilisation is None else text.percent(device.utilisation)


def _readings(
    device: DeviceReading, *, brief: bool = False, bandwidth: bool = False, power: bool = True
) -> list[Content]:
    """power: temperature and power, "n/a" where a card does not give them; of a processor, those that it gives.
    bandwidth: also the share of time in which its memory was read or written."""
    found = [*_heat(device), *_power(device, brief)] if power else []
    if bandwidth and device.sensors is not None and device.sensors.memory_utilisation is not None:
        share = text.percent(device.sensors.memory_utilisation)
        found.insert(0, Content.assemble(("mem interface ", "$muted"), f"{share:>4}"))
    if device.sensors is not None and device.sensors.xid_errors:
        found.insert(0, Content.styled(f"Xid {device.sensors.xid_errors[-1]}", "$error"))
    if harmful_throttling(device):
        found.insert(0, Content.styled("throttled", "$warning"))
    return found


def _heat(device: DeviceReading) -> Iterator[Content]:
    if device.temperature_c is not None:
        hot = device.temperature_c >= HOT_C
        yield Content.styled(f"{device.temperature_c:.0f}°C{' hot' if hot else ''}", "$gpu-hot" if hot else "")
    elif device.kind != "cpu":
        yield Content.styled("n/a °C", "$muted")


def _power(device: DeviceReading, brief: bool) -> Iterator[Content]:
    if device.power_w is not None:
        limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w is not None and not brief else ""
        yield Content(f"{device.power_w:.0f}{limit} W")
    elif device.kind != "cpu":
        yield Content.styled("n/a W", "$muted")


def _stranger(device: str, process: ProcessMemory) -> Content:
    name = process.name.rpartition("/")[2] or "process"
    used = f" {text.size(process.used_bytes)}" if process.used_bytes else ""
    return Content.assemble(f"{text.clip(name, 20)} ({process.pid})", (f"{used} on {device}", "$muted"))


FEW = 2
_DETAILED_WIDTH = 56
_PAIRED_WIDTH = 72
_TABLE_WIDTH = 90
_NUMBERS_WIDTH = 108
_BANDWIDTH_WIDTH = 140


class DevicesPanel(RowsPanel):
    """Up to two cards: four rows each where there is room, else one."""

    NAME = "devices"
    TITLE = "Devices"
    PLACE: ClassVar[Place] = "left"
    ORDER = 10
    MANY: ClassVar[bool] = False

    DEFAULT_CSS = """
    DevicesPanel { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._devices: tuple[DeviceReading, ...] = ()
        self._history: tuple[Second, ...] = ()
        self._cursor: float | None = None
        self._width = 0

    def show(self, view: View) -> None:
        """Draw the rows that changed; none where another panel has the devices."""
        snapshot = view.snapshot
        devices, newest = snapshot.devices, snapshot.history[-1:]
        if is_many(devices) != self.MANY:
            return
        if devices == self._devices and newest == self._history[-1:]:
            return
        self._devices, self._history = devices, snapshot.history
        self._draw()

    def point(self, at: float | None) -> None:
        """Show the values of that moment next to the small graphs, and its time in the frame."""
        if at != self._cursor:
            self._cursor = at
            self._draw()

    def on_mouse_move(self, event: MouseMove) -> None:
        """Say which moment of a small graph is under the mouse."""
        self.post_message(Graph.Pointed(self._moment_under(event)))

    def on_leave(self) -> None:
        """No moment is under the mouse."""
        self.post_message(Graph.Pointed(None))

    def _moment_under(self, event: MouseMove) -> float | None:
        offset = event.get_content_offset(self)
        if offset is None or offset.y >= len(self.rows()) or not self._history:
            return None
        found = column_under(self.rows()[offset.y], offset.x)
        return None if found is None else moment_of(found[1], self._history[-1].at, _step(found[0]))

    def _draw(self) -> None:
        self._frame()
        self._width = self.size.width
        self.show_rows(self._lines(self._width))

    def fit(self) -> None:
        """The screen has another size: so may the form have."""
        self._frame()
        self._width = -1
        self.refresh(layout=True)

    def rows(self) -> Sequence[Content]:
        """Return the rows in the width that there is now."""
        if self._width != self.size.width:
            self._width = self.size.width
            self._rows = self._lines(self._width)
        return self._rows

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as there are lines."""
        return max(1, len(self._lines(width)))

    def _frame(self) -> None:
        """Title, and the moment under the cursor of the small graphs, else what these show where no line says it."""
        width, is_table = self.size.width, is_many(self._devices)
        graphs = ""
        if width >= _TABLE_WIDTH if is_table else self._is_detailed(width):
            if self._cursor is not None and self._history:
                graphs = moment_text(self._cursor, self._history[-1].at)
            elif not (is_table and self._has_numbers(width)):
                graphs = f"graphs: 0 to 100%, last {SPAN_S // 60} min"
        set_frame(self, self._heading(), graphs)

    def _is_detailed(self, width: int) -> bool:
        return self.screen.has_class("-tall") and width >= _DETAILED_WIDTH

    def _heading(self) -> Content:
        """Return the title, with the legend where no line has it."""
        name = Content(title(self._devices))
        if not self._is_headed(self.size.width):
            return name
        return for_terminal(
            self.app, Content.assemble(name, "  ", legend(self.size.width, letters=is_lettered(self.app)))
        )

    def _is_headed(self, width: int) -> bool:
        if width >= _TABLE_WIDTH:
            return is_many(self._devices) and not self._has_numbers(width)
        return is_many(self._devices) and width >= _PAIRED_WIDTH and self.screen.has_class("-short")

    def _has_numbers(self, width: int) -> bool:
        return width >= _NUMBERS_WIDTH and not self.screen.has_class("-short")

    def _lines(self, width: int) -> list[Content]:
        short = self.screen.has_class("-short")
        panel = Panel(self._devices, width, self._history, is_ascii(self.app), is_lettered(self.app), self._cursor)
        lines = self._form(panel, short=short)
        if not short:
            lines += other_processes(self._devices, width)
        return [for_terminal(self.app, line) for line in lines]

    def _form(self, panel: Panel, *, short: bool) -> list[Content]:
        width = panel.width
        if not is_many(panel.devices):
            if self._is_detailed(width):
                return detailed_rows(panel)
            return brief_rows(panel, numbers=not short)
        if width >= _TABLE_WIDTH:
            return table(panel, numbers=self._has_numbers(width))
        return paired_rows(panel) if short and width >= _PAIRED_WIDTH else brief_rows(panel)


class ManyDevicesPanel(DevicesPanel):
    """More cards, over the whole width: one or half a row each."""

    NAME = "many-devices"
    PLACE = "top"
    MANY = True


def is_many(devices: Sequence[DeviceReading]) -> bool:
    """Return whether there are more cards than can have several rows each."""
    return sum(device.kind != "cpu" for device in devices) > FEW


def title(devices: Sequence[DeviceReading]) -> str:
    """The frame's: that devices are simulated stands there in every form."""
    cards = [device for device in devices if device.kind != "cpu"]
    simulated = sum(device.kind == "simulated" for device in cards)
    if not simulated:
        return "Devices"
    return "Devices (simulated)" if simulated == len(cards) else f"Devices ({simulated} of {len(cards)} simulated)"
