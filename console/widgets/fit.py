"""The fit preview: whether a model would fit, and what it would take of each device, one line for each."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content

from console.widgets import text
from console.widgets.bars import Part, stack
from console.widgets.names import device_name, places_name
from engine.estimate import DeviceEstimate, Estimate

_COLUMNS = (
    ("weights", "weights_bytes"),
    ("KV", "kv_bytes"),
    ("work", "working_bytes"),
    ("in use", "others_bytes"),
    ("free", "free_bytes"),
)
_CELLS = 8
_LEAST_BAR, _MOST_BAR = 8, 30
_MIB = 2**20
_LACKING = 14
_PARTS = (
    ("weights_bytes", "$gpu-weights", "w"),
    ("kv_bytes", "$gpu-kv", "k"),
    ("working_bytes", "$gpu-work", "o"),
    ("others_bytes", "$gpu-others", "x"),
    ("headroom_bytes", "$gpu-free", "."),
    ("free_bytes", "$gpu-free", "."),
)


def verdict(found: Estimate) -> Content:
    """The sentence, with its glyph and colour."""
    glyph, style = ("✓", "$success") if found.can_load else ("✖", "$error")
    return Content.styled(f"{glyph} {found.verdict}", style)


def fit_lines(found: Estimate, width: int = 0, *, ascii_only: bool = False) -> Iterator[Content]:
    """Verdict, devices, where each worker would go, and what the numbers rest on. width: devices have bars where it
    leaves room."""
    yield verdict(found)
    yield from _table(found, width, ascii_only)
    if found.placements:
        places = places_name([share.device for share in each.shares] for each in found.placements)
        yield Content.assemble(("workers  ", "$muted"), places)
    if found.simulated:
        yield Content.styled("The devices are simulated: workers compute on the CPU.", "$warning")
    if found.warning:
        yield Content.styled(found.warning, "$warning")
    if found.learned.loads:
        yield Content.styled(f"Corrected by {text.plural(found.learned.loads, 'earlier load')}.", "$muted")


def _table(found: Estimate, width: int, ascii_only: bool) -> Iterator[Content]:
    """Devices that would hold something or lack it, in one unit; what lacks is in MiB, in place of what is free."""
    rows = [device for device in found.devices if device.weights_bytes or device.short_bytes or len(found.devices) == 1]
    if not rows:
        return
    names = max(5, *(len(device_label(device)) for device in rows))
    last = _LACKING if any(device.short_bytes for device in rows) else _CELLS
    unit = text.common_unit([device.weights_bytes + device.kv_bytes + device.working_bytes for device in rows])
    *titles, free = [title for title, _ in _COLUMNS]
    head = f"{unit:<{names}}" + "".join(f"{title:>{_CELLS}}" for title in titles) + f"{free:>{last}}"
    room = min(_MOST_BAR, width - len(head) - 2)
    yield Content.styled(head, "$muted")
    for device in rows:
        line = _device(device, names, last, unit)
        if room >= _LEAST_BAR:
            line = Content.assemble(line, "  ", _bar(device, room, ascii_only))
        yield line


def _bar(device: DeviceEstimate, width: int, ascii_only: bool) -> Content:
    """The device by what would hold its memory; what lacks does not show, for it is full then."""
    parts = [Part(float(getattr(device, field)), style, letter) for field, style, letter in _PARTS]
    return stack(parts, width, ascii_only=ascii_only)


def lacking(device: DeviceEstimate) -> str:
    """ "2,310 MiB", rounded up."""
    return f"{-(-device.short_bytes // _MIB):,} MiB"


def _device(device: DeviceEstimate, names: int, last: int, unit: str) -> Content:
    *parts, (_, free) = _COLUMNS
    numbers = "".join(f"{text.in_unit(getattr(device, field), unit):>{_CELLS}}" for _, field in parts)
    if device.short_bytes:
        left = Content.styled(f"{f'✖ −{lacking(device)}':>{last}}", "bold $error")
    else:
        left = Content.styled(f"{text.in_unit(getattr(device, free), unit):>{last}}", "$success")
    return Content.assemble((f"{device_label(device):<{names}}", "bold $foreground"), numbers, left)


def device_label(device: DeviceEstimate) -> str:
    """Its name on the screen, with its node's where that is not this machine."""
    local = device.id.rpartition("/")[2]
    return device_name(f"{device.node}/{local}" if device.node else local)
