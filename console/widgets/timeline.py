"""One request over its time: what it waited for, where it was, and when its tokens came. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from textual.content import Content

from console.widgets import text
from console.widgets.plot import draw
from engine.records import Burst, RequestDetail

Kind = Literal["queued", "prefill", "decode"]

_GLYPHS: dict[Kind, str] = {"queued": "◌", "prefill": "◔", "decode": "●"}
_FILLS: dict[Kind, str] = {"queued": ".", "prefill": "─", "decode": "━"}
_ROWS = 3
_PHASE = 22
_MIN_PAUSES = 4
_PAUSES = 3
_MIN_S = 1e-6
"""Nothing took less; a part of such a time, as it may come from elsewhere, is no number."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, in seconds since it was submitted. lost: it ended with its worker's death."""

    kind: Kind
    since_s: float
    until_s: float
    worker: str = ""
    lost: bool = False


def phases(detail: RequestDetail) -> list[Phase]:
    """The parts of its time without a gap, up to now or to its end."""
    found, at, end = list[Phase](), 0.0, detail.row.age_s
    for stay in detail.stays:
        if stay.since_s > at:
            found.append(Phase("queued", at, stay.since_s))
        until = end if stay.until_s is None else stay.until_s
        first = next((burst.since_s for burst in detail.bursts if burst.until_s >= stay.since_s), until)
        first = min(max(first, stay.since_s), until)
        decodes = first < until
        if first > stay.since_s:
            found.append(Phase("prefill", stay.since_s, first, stay.worker, stay.lost and not decodes))
        if decodes:
            found.append(Phase("decode", first, until, stay.worker, stay.lost))
        at = until
    if end > at:
        found.append(Phase("queued", at, end))
    return found


def pauses(bursts: Sequence[Burst]) -> list[tuple[float, float]]:
    """The longest times without a token once they came: (when, how long), the longest first. Only those that stand out:
    of at least twice the mean."""
    gaps = [(before.until_s, after.since_s - before.until_s) for before, after in pairwise(bursts)]
    if len(gaps) < _MIN_PAUSES:
        return []
    mean = sum(gap for _, gap in gaps) / len(gaps)
    return sorted((gap for gap in gaps if gap[1] >= 2 * mean), key=lambda gap: -gap[1])[:_PAUSES]


def chart(detail: RequestDetail, width: int, *, ascii_only: bool = False) -> list[Content]:
    """Tokens per second over its time, the phases below, and the times below those. The bar's fill and colour say
    which phase it is."""
    end = detail.row.age_s
    if end < _MIN_S:
        return []
    lines = _tokens(detail.bursts, end, width, ascii_only) if detail.bursts else []
    return [*lines, _bar(phases(detail), end, width), _axis(detail, end, width)]


def _column(at: float, end: float, width: int) -> int:
    return min(width - 1, max(0, int(at / end * width)))


def rates(bursts: Sequence[Burst], end: float, width: int) -> list[float | None]:
    """Tokens per second in each of `width` equal parts of the time until `end`; what was joined is spread evenly."""
    tokens = [0.0] * width
    for burst in bursts:
        first, last = _column(burst.since_s, end, width), _column(burst.until_s, end, width)
        for column in range(first, last + 1):
            tokens[column] += burst.tokens / (last + 1 - first)
    return [each * width / end if each else None for each in tokens]


def _tokens(bursts: Sequence[Burst], end: float, width: int, ascii_only: bool) -> list[Content]:
    values = rates(bursts, end, width)
    top = max(value for value in values if value is not None)
    plot = draw(values, [], top, _ROWS, ascii_only=ascii_only)
    return [Content.styled("".join(cell.char for cell in row), "$graph-tokens") for row in plot]


def _bar(found: Sequence[Phase], end: float, width: int) -> Content:
    """The middle of each column decides; a phase too short for one is in the list below the chart alone."""
    middles = [(column + 0.5) * end / width for column in range(width)]
    kinds = [next((phase.kind for phase in found if middle <= phase.until_s), None) for middle in middles]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return Content.assemble(
        *((_FILLS[kind] * cells, f"$request-{kind}") if kind else " " * cells for kind, cells in runs)
    )


def _axis(detail: RequestDetail, end: float, width: int) -> Content:
    right = text.seconds(end)
    first = detail.bursts[0].since_s if detail.bursts else None
    line = "0" + " " * (width - 1 - len(right)) + right
    if first is not None:
        at, label = _column(first, end, width), f"▏first token {text.seconds(first)}"
        at = max(2, min(at, width - len(right) - len(label) - 1))
        if at + len(label) < width - len(right):
            line = line[:at] + label + line[at + len(label) :]
    return Content.styled(line, "$muted")


def listing(detail: RequestDetail) -> Iterator[Content]:
    """The phases in words, with what became of their workers."""
    row, began = detail.row, False
    yield Content.styled(f"{'phase':<{_PHASE}}{'began':>8}{'took':>9}", "$muted")
    for at, phase in enumerate(phases(detail)):
        where = f" on {phase.worker}" if phase.worker else (" again" if at else "")
        more = ""
        if phase.kind == "prefill" and not began:
            cached = f", {row.cached_tokens:,} of them cached" if row.cached_tokens else ""
            more, began = f"  {row.prompt_tokens:,} tokens{cached}", True
        yield Content.assemble(
            (f"{_GLYPHS[phase.kind]} {phase.kind}", f"$request-{phase.kind}"),
            where.ljust(_PHASE - 2 - len(phase.kind)),
            (f"{text.seconds(phase.since_s):>8} ", "$muted"),
            f"{text.seconds(phase.until_s - phase.since_s):>8}",
            (more, "$muted"),
        )
        if phase.lost:
            yield Content.styled(f"✖ {phase.worker} was lost; the request went back to the queue", "$request-failed")
