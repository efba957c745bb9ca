"""Where the layers of a worker lie and what they take: planned against used, device by device, in aligned columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content

from console.widgets import text
from console.widgets.bars import Part, stack
from console.widgets.names import device_name
from engine.config import DeviceShare

_LEAST_BAR, _MOST_BAR = 8, 40
_NUMBER = 8
_MUCH_MORE = 5
_KINDS = (
    ("weights", "weights_bytes", "$gpu-weights", "w"),
    ("KV", "kv_bytes", "$gpu-kv", "k"),
    ("work", "working_bytes", "$gpu-work", "o"),
)


def placement_map(
    planned: Sequence[DeviceShare],
    used: Sequence[DeviceShare],
    totals: Mapping[str, int],
    width: int,
    *,
    ascii_only: bool = False,
) -> list[Content]:
    """A head, then two rows for each device. totals: bytes of each device by id, what its bars are measured against."""
    devices = devices_of(planned, used)
    if not devices:
        return []
    unit = text.common_unit([share.total_bytes for share in (*planned, *used)])
    names = max(len(device_name(device)) for device in devices)
    fixed = names + len("  planned ") + _NUMBER * (len(_KINDS) + 1)
    room = min(_MOST_BAR, max(_LEAST_BAR, width - fixed))
    head = "".join(f"{title:>{_NUMBER}}" for title in (*(title for title, *_ in _KINDS), unit))
    lines = [Content.styled(" " * (fixed - len(head) + room) + head, "$muted")]
    for device in devices:
        both = (_share(planned, device), _share(used, device))
        whole = max(totals.get(device, 0), *(share.total_bytes for share in both if share is not None))
        for name, label, share in zip((device_name(device), ""), ("planned", "used"), both, strict=True):
            bar = _bar(share, whole, room, ascii_only)
            lines.append(
                Content.assemble(
                    (f"{name:<{names}}  ", "bold $foreground"), (f"{label:<8}", "$muted"), bar, _numbers(share, unit)
                )
            )
    return lines


def difference(planned: Sequence[DeviceShare], used: Sequence[DeviceShare], device: str) -> Content:
    """ "planned 16.7 → used 16.2 GiB, −3%", of one device."""
    before, after = _share(planned, device), _share(used, device)
    known = [share.total_bytes for share in (before, after) if share is not None]
    unit = text.common_unit(known)
    numbers = [
        Content.assemble((f"{word} ", "$muted"), text.in_unit(share.total_bytes, unit))
        for word, share in (("planned", before), ("used", after))
        if share is not None
    ]
    line = Content.assemble(Content.styled(" → ", "$muted").join(numbers), f" {unit}")
    if before is None or after is None or not before.total_bytes:
        return line
    change = round(100 * (after.total_bytes / before.total_bytes - 1))
    said = f"{'+' if change > 0 else '−'}{abs(change)}%" if change else "as planned"
    return Content.assemble(line, (f", {said}", "$warning" if change > _MUCH_MORE else "$muted"))


def devices_of(*shares: Sequence[DeviceShare]) -> list[str]:
    """Every device that is named, once, in order."""
    return list(dict.fromkeys(share.device for group in shares for share in group))


def taken_on(device: str, shares: Sequence[DeviceShare]) -> int:
    """Bytes that shares take of a device."""
    return sum(share.total_bytes for share in shares if share.device == device)


def _share(shares: Sequence[DeviceShare], device: str) -> DeviceShare | None:
    return next((share for share in shares if share.device == device), None)


def _bar(share: DeviceShare | None, whole: int, width: int, ascii_only: bool) -> Content:
    if share is None or whole <= 0:
        return Content.styled("·" * width, "$gpu-free")
    parts = [Part(float(getattr(share, field)), style, letter) for _, field, style, letter in _KINDS]
    rest = Part(float(whole - share.total_bytes), "$gpu-free", ".")
    return stack([*parts, rest], width, ascii_only=ascii_only)


def _numbers(share: DeviceShare | None, unit: str) -> Content:
    if share is None:
        return Content.styled(f"{'–':>{_NUMBER}}" * (len(_KINDS) + 1), "$muted")
    kinds = "".join(f"{text.in_unit(getattr(share, field), unit):>{_NUMBER}}" for _, field, _, _ in _KINDS)
    return Content.assemble(kinds, (f"{text.in_unit(share.total_bytes, unit):>{_NUMBER}}", "bold $foreground"))
