"""Legends of devices: what the colours of memory bars mean, or their letters, with and without numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from console.widgets import text
from engine.snapshot import DeviceReading


@dataclass(frozen=True, slots=True)
class Kind:
    """What may hold memory. style: a CSS variable; letter: what fills the bar in ASCII; width: of its numbers."""

    label: str
    field: str
    style: str
    mark: str
    letter: str
    width: int

    def sign(self, letters: bool, gap: str = " ") -> str:
        """What stands before its name in a legend; nothing where its name begins with its letter and room is scarce."""
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


KINDS = (
    Kind("weights", "weights_bytes", "$gpu-weights", "■", "w", 8),
    Kind("KV", "kv_bytes", "$gpu-kv", "■", "k", 5),
    Kind("work", "work_bytes", "$gpu-work", "■", "o", 5),
    Kind("others", "others_bytes", "$gpu-others", "■", "x", 7),
    Kind("free", "free_bytes", "$gpu-free", "□", ".", 5),
)


def legend(width: int, *, letters: bool = False) -> Content:
    """What the colours of the bars mean, or their letters."""
    parts = [Content.assemble((kind.sign(letters), kind.style), (kind.label, "$muted")) for kind in KINDS]
    return _joined(parts, width)


def _legend_parts(device: DeviceReading, letters: bool, gap: str = " ") -> list[Content]:
    """Nobody else can hold memory of a simulated device."""
    return [
        Content.assemble(
            (kind.sign(letters, gap), kind.style),
            (f"{kind.label} ", "$muted"),
            text.gib(kind.size(device)),
        )
        for kind in KINDS
        if device.kind != "simulated" or kind.label != "others"
    ]


def numbered(device: DeviceReading, width: int, *, letters: bool = False) -> Content:
    """With the GiB of one device, in one row."""
    line = _joined(_legend_parts(device, letters), width)
    return line if line.cell_length <= width else Content(" ").join(_legend_parts(device, letters, gap=""))


def folded(device: DeviceReading, indent: int, width: int, *, letters: bool = False) -> list[Content]:
    """With the GiB of one device, in one row, or in two where it is too long for one."""
    room, left = width - indent, " " * indent
    parts = _legend_parts(device, letters)
    for whole in (Content("  ").join(parts), Content(" ").join(_legend_parts(device, letters, gap=""))):
        if whole.cell_length <= room:
            return [Content.assemble(left, whole)]
    return [Content.assemble(left, Content("  ").join(half)) for half in (parts[:3], parts[3:])]


def _joined(parts: Sequence[Content], width: int) -> Content:
    """Side by side, closer where there is less room."""
    wide = Content("  ").join(parts)
    return wide if wide.cell_length <= width else Content(" ").join(parts)
