"""Small charts of insight as content: a histogram in columns, shares as bars. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

from console.widgets import text
from console.widgets.plot import draw
from engine.insight_values import Lengths

_ROWS = 4
_WIDEST = 6
_NARROWEST = 2
_LABEL = 11
_SHARE = 5


def histogram(lengths: Lengths, width: int, style: str, *, ascii_only: bool = False) -> list[Content]:
    """Columns for the buckets that have something and those between, with the upper bound of each beneath.

    Where there are more than fit, neighbours are drawn as one.
    """
    labels = [*map(_bound, lengths.bounds), "more"]
    filled = [index for index, count in enumerate(lengths.counts) if count]
    if not filled:
        return []
    first, last = max(0, filled[0] - 1), min(len(labels), filled[-1] + 2)
    counts, labels = list(lengths.counts[first:last]), labels[first:last]
    while len(counts) * _NARROWEST > width and len(counts) > 1:
        counts, labels = _in_pairs(counts), [*labels[1::2], *labels[len(labels) - len(labels) % 2 :]]
    cells = max(_NARROWEST, min(_WIDEST, width // len(counts)))
    heights = [float(count) if cell < cells - 1 else None for count in counts for cell in range(cells)]
    rows = draw(heights, [], max(counts), _ROWS, ascii_only=ascii_only)
    plot = [Content.styled("".join(cell.char for cell in row), style) for row in rows]
    return [*plot, Content.styled(_axis(labels, cells), "$muted")]


def _bound(tokens: int) -> str:
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}k"


def _in_pairs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[index : index + 2]) for index in range(0, len(counts), 2)]


def _axis(labels: Sequence[str], cells: int) -> str:
    """As many of the labels as fit under their columns, the last one in any case."""
    every = next((step for step in range(1, len(labels)) if step * cells > max(map(len, labels))), len(labels))
    shown = [label if (len(labels) - 1 - index) % every == 0 else "" for index, label in enumerate(labels)]
    line = ""
    for index, label in enumerate(shown):
        line = f"{line:<{index * cells}}{label}" if label else line
    return line


def percent(share: float) -> str:
    """ "6%"; what is there and rounds to nothing is "<1%"."""
    return "<1%" if 0 < share < 0.005 else text.percent(share)


def gauge(share: float, width: int, style: str) -> Content:
    """A share of 100% as a line, heavy as far as it goes, so that it is read without colours too."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    whole, half = divmod(halves, 2)
    line = "━" * whole + "╸" * half
    return Content.assemble((line, style), ("─" * (width - len(line)), "$gpu-free"))


def share_bars(shares: Iterable[tuple[str, float, str, str]], width: int) -> list[Content]:
    """A line for each (name, share, style, numbers): the name, a bar of the share, the share, the numbers."""
    rows = list(shares)
    numbers = max((len(row[3]) for row in rows), default=0)
    bar = max(4, width - _LABEL - _SHARE - numbers - 2)
    return [
        Content.assemble(
            (f"{name:<{_LABEL}}", "$muted"),
            gauge(share, bar, style),
            (f"{percent(share):>{_SHARE}}", "bold"),
            (f"  {said:>{numbers}}", "$muted"),
        )
        for name, share, style, said in rows
    ]
