"""The fit preview: whether a model would fit, and what it would take of each device, one line for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from textual.content import Content

from console.widgets import text
from console.widgets.names import device_name, devices_name
from engine.estimate import DeviceEstimate, Estimate

_COLUMNS = (
    ("weights", "weights_bytes"),
    ("KV", "kv_bytes"),
    ("work", "working_bytes"),
    ("in use", "others_bytes"),
    ("free", "free_bytes"),
)
_CELLS = 8


def verdict(found: Estimate) -> Content:
    """The sentence, with its glyph and colour."""
    glyph, style = ("✓", "$success") if found.can_load else ("✖", "$error")
    return Content.styled(f"{glyph} {found.verdict}", style)


def fit_lines(found: Estimate) -> Iterator[Content]:
    """Verdict, devices, where each worker would go, and what the numbers rest on."""
    yield verdict(found)
    yield from _table(found)
    if found.placements:
        places = Counter(devices_name([share.device for share in each.shares]) for each in found.placements)
        where = ", ".join(f"{workers} on {place}" for place, workers in places.items())
        yield Content.assemble(("workers  ", "$muted"), where)
    if found.simulated:
        yield Content.styled("The devices are simulated: workers compute on the CPU.", "$warning")
    if found.learned.loads:
        yield Content.styled(f"Corrected by {text.plural(found.learned.loads, 'earlier load')}.", "$muted")


def _table(found: Estimate) -> Iterator[Content]:
    """Devices that would hold something or lack it, in one unit; what is lacking is less than nothing free."""
    rows = [device for device in found.devices if device.weights_bytes or device.short_bytes or len(found.devices) == 1]
    if not rows:
        return
    names = max(5, *(len(_name(device)) for device in rows))
    unit = text.common_unit([device.weights_bytes + device.kv_bytes + device.working_bytes for device in rows])
    head = "".join(f"{title:>{_CELLS}}" for title, _ in _COLUMNS)
    yield Content.styled(f"{unit:<{names}}{head}", "$muted")
    for device in rows:
        yield _device(device, names, unit)


def _device(device: DeviceEstimate, names: int, unit: str) -> Content:
    *parts, (_, free) = _COLUMNS
    numbers = "".join(f"{text.in_unit(getattr(device, field), unit):>{_CELLS}}" for _, field in parts)
    if device.short_bytes:
        lacking = f"✖ −{text.in_unit(device.short_bytes, unit)}"
        left = Content.styled(f"{lacking:>{_CELLS}}", "bold $error")
    else:
        left = Content.styled(f"{text.in_unit(getattr(device, free), unit):>{_CELLS}}", "$success")
    return Content.assemble((f"{_name(device):<{names}}", "bold $foreground"), numbers, left)


def _name(device: DeviceEstimate) -> str:
    local = device.id.rpartition("/")[2]
    return device_name(f"{device.node}/{local}" if device.node else local)
