"""Bars in eighths of a cell: one level against its whole, or several parts stacked to a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from textual.content import Content

from console.widgets.glyphs import ROWS
from console.widgets.plot import draw

_EIGHTHS = 8


class Part(NamedTuple):
    """One part of a stack. style: a CSS variable; letter: what fills it in ASCII."""

    value: float
    style: str
    letter: str


def meter(fraction: float | None, width: int, style: str) -> Content:
    """A level against 100% as a line in half cells, what is left a thinner one; bare where it is not known."""
    halves = round(min(1.0, max(0.0, fraction or 0.0)) * width * 2)
    whole, half = divmod(halves, 2)
    line = "━" * whole + "╸" * half
    return Content.assemble((line, style), ("─" * (width - len(line)), "$gpu-free"))


def spark(shares: Sequence[float | None], style: str, *, ascii_only: bool = False) -> Content:
    """Shares of a whole over time in one row, a column each, against 100%."""
    rows = draw(shares, (), 1.0, 1, ascii_only=ascii_only)
    return Content.styled("".join(cell.char for cell in rows[0]), f"{style} on $gpu-free")


def stack(parts: Sequence[Part], width: int, *, ascii_only: bool = False) -> Content:
    """The parts side by side in `width` cells; each that is not zero shows, if only as an eighth of a cell."""
    edges = _edges([part.value for part in parts], width * _EIGHTHS)
    cells: list[tuple[str, str]] = []
    for cell in range(width):
        start, end = cell * _EIGHTHS, (cell + 1) * _EIGHTHS
        inside = [index for index in range(len(parts)) if edges[index] < end and edges[index + 1] > start]
        if not inside:
            cells.append((" ", ""))
            continue
        first, second = inside[0], max(inside[1:], key=lambda index: edges[index + 1] - edges[index], default=None)
        if second is None:
            cells.append((parts[first].letter if ascii_only else ROWS[-1], parts[first].style))
            continue
        share = min(edges[first + 1], end) - max(edges[first], start)
        if ascii_only:
            larger = parts[first if share * 2 >= _EIGHTHS else second]
            cells.append((larger.letter, larger.style))
        else:
            cells.append((ROWS[share], f"{parts[first].style} on {parts[second].style}"))
    return Content.assemble(*cells).simplify()


def _edges(values: Sequence[float], room: int) -> list[int]:
    """Where each value begins and the last ends, in eighths. Sums to `room`; the largest pays for the rounding."""
    total = sum(max(0.0, value) for value in values)
    if total <= 0:
        return [0] * (len(values) + 1)
    sizes = [max(1, round(value / total * room)) if value > 0 else 0 for value in values]
    sizes[max(range(len(sizes)), key=sizes.__getitem__)] += room - sum(sizes)
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return edges
