"""Devices: how busy each one is and what holds its memory, in the form that there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from console.widgets.device_legend import legend
from console.widgets.device_lines import Panel, brief, detailed, paired, strangers, table
from console.widgets.glyphs import fitted, is_ascii, is_lettered
from console.widgets.redraw import entitle, refresh_rows
from engine.snapshot import DeviceReading, Second, Snapshot

FEW = 2
_DETAILED_WIDTH = 56
_PAIRED_WIDTH = 72
_TABLE_WIDTH = 90
_NUMBERS_WIDTH = 108


class DevicesPanel(Widget):
    """Four rows for each of up to two cards where there is room, else one or half a row each."""

    DEFAULT_CSS = """
    DevicesPanel { height: auto; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "Devices"
        self._devices: tuple[DeviceReading, ...] = ()
        self._history: tuple[Second, ...] = ()
        self._shown: list[Content] = []

    def show(self, snapshot: Snapshot) -> None:
        """Draw anew, where anything changed."""
        devices, newest = snapshot.devices, snapshot.history[-1:]
        if devices == self._devices and newest == self._history[-1:]:
            return
        self._devices, self._history = devices, snapshot.history
        entitle(self, self._heading())
        before, self._shown = self._shown, self._lines(self.size.width)
        refresh_rows(self, before, self._shown)

    def fit(self) -> None:
        """The screen has another size: so may the form have."""
        entitle(self, self._heading())
        self._shown = self._lines(self.size.width)
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as there are lines."""
        return max(1, len(self._lines(width)))

    def render(self) -> Content:
        """All lines."""
        return Content("\n").join(self._lines(self.size.width))

    def _heading(self) -> Content:
        """What the colours mean, too, where no line says it."""
        name = Content(title(self._devices))
        if not self._is_headed(self.size.width):
            return name
        return fitted(self.app, Content.assemble(name, "  ", legend(self.size.width, letters=is_lettered(self.app))))

    def _is_headed(self, width: int) -> bool:
        if width >= _TABLE_WIDTH:
            return is_many(self._devices) and not self._has_numbers(width)
        return is_many(self._devices) and width >= _PAIRED_WIDTH and self.screen.has_class("-short")

    def _has_numbers(self, width: int) -> bool:
        return width >= _NUMBERS_WIDTH and not self.screen.has_class("-short")

    def _lines(self, width: int) -> list[Content]:
        short = self.screen.has_class("-short")
        panel = Panel(self._devices, width, self._history, is_ascii(self.app), is_lettered(self.app))
        lines = self._form(panel, short=short)
        if not short:
            lines += strangers(self._devices, width)
        return [fitted(self.app, line) for line in lines]

    def _form(self, panel: Panel, *, short: bool) -> list[Content]:
        width = panel.width
        if not is_many(panel.devices):
            if self.screen.has_class("-tall") and width >= _DETAILED_WIDTH:
                return detailed(panel)
            return brief(panel, numbers=not short)
        if width >= _TABLE_WIDTH:
            return table(panel, numbers=self._has_numbers(width))
        return paired(panel) if short and width >= _PAIRED_WIDTH else brief(panel)


def is_many(devices: Sequence[DeviceReading]) -> bool:
    """Whether there are more cards than can have several rows each."""
    return sum(device.kind != "cpu" for device in devices) > FEW


def title(devices: Sequence[DeviceReading]) -> str:
    """The frame's: that devices are simulated stands there in every form."""
    cards = [device for device in devices if device.kind != "cpu"]
    simulated = sum(device.kind == "simulated" for device in cards)
    if not simulated:
        return "Devices"
    return "Devices (simulated)" if simulated == len(cards) else f"Devices ({simulated} of {len(cards)} simulated)"
