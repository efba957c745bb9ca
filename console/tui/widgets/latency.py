"""The time of requests: by cause, as a bar with a sentence on what to change, and by phase, with percentiles. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

from textual.app import App
from textual.content import Content
from textual.style import Style

from console import text
from console.tui.widgets.glyphs import is_ascii, is_lettered
from console.tui.widgets.plot import BarSegment, stack
from engine.requests.causes import OWN_WORK, Cause, Why
from engine.snapshot import Snapshot, Spread


class _Look(NamedTuple):
    """A cause in words, what fills it in the bar, also without block characters and colours, and its colour. Any two
    may be side by side: they differ in fill or colour."""

    words: str
    fill: str
    letter: str
    style: str


_CAUSES: Mapping[Cause, _Look] = MappingProxyType(
    {
        "prepare": _Look("preparing the prompt", "░", "R", "$request-prefill"),
        "slot": _Look("waiting for a slot", ".", "S", "$request-queued"),
        "pages": _Look("waiting for KV pages", "░", "K", "$warning"),
        "step_tokens": _Look("waiting for step tokens", "▓", "T", "$warning"),
        "prompts": _Look("sharing steps with other prompts", "▒", "P", "$primary"),
        "preempted": _Look("preempted", "▓", "X", "$request-failed"),
        "slow_worker": _Look("slower worker than its peers", "▒", "W", "$request-failed"),
        "client": _Look("client reading the answer", "░", "C", "$primary"),
        "grammar": _Look("grammar compile", "▒", "G", "$warning"),
        "load": _Look("model load", "▒", "L", "$request-prefill"),
        "swap": _Look("model swap", "▓", "M", "$request-prefill"),
        "lost_worker": _Look("lost worker", "░", "D", "$request-failed"),
        "prefill": _Look("own prefill", "─", "-", "$request-prefill"),
        "decode": _Look("own decode", "━", "=", "$request-decode"),
    }
)

_MIN_S = 1e-6
"""Nothing took less; a part of such a time, as it may come from elsewhere, is not a number."""

_MIN_SHARE = 0.005
"""What took less is left out."""

_CAUSE_CELLS = 34
CAUSE_META = "cause"
"""Key of the meta of each part of a bar: what it stands for."""


def cause_bar(why: Why, width: int, *, lettered: bool = False) -> Content:
    """All of the time by cause, in `width` cells, each part with its cause as CAUSE_META. lettered: where block
    characters or colours are lacking."""
    shown = _shown(why)
    ends = [round(min(1.0, end / why.total_s) * width) for end in accumulate(shown.values())]
    cells = [end - begin for begin, end in pairwise((0, *ends))]
    parts = (
        Content.styled(_fill(cause, lettered) * each, _CAUSES[cause].style).stylize(
            Style.from_meta({CAUSE_META: cause})
        )
        for cause, each in zip(shown, cells, strict=True)
    )
    return Content("").join(parts)


def cause_list(why: Why, *, lettered: bool = False, pointed: Cause | None = None) -> Iterator[Content]:
    """Each cause with its seconds and share, the largest first. pointed: the one to highlight."""
    for cause, spent in _shown(why).items():
        line = Content.assemble(
            (f"{_fill(cause, lettered)} ", _CAUSES[cause].style),
            f"{_CAUSES[cause].words:<{_CAUSE_CELLS}}",
            f"{text.seconds(spent):>9}",
            (f"{text.percent(spent / why.total_s):>6}", "$muted"),
        )
        yield line.stylize("reverse", 2) if cause == pointed else line


def cause_text(why: Why, cause: Cause | None) -> str:
    """A cause with its seconds and share: "waiting for a slot 3.10 s (42%)"; "" where it took no time."""
    spent = _shown(why).get(cause) if cause is not None else None
    if cause is None or spent is None:
        return ""
    return f"{_CAUSES[cause].words} {text.seconds(spent)} ({text.percent(spent / why.total_s)})"


def advice_lines(why: Why, width: int) -> list[Content]:
    """The sentence on what to change."""
    return [Content.styled(line, "$warning") for line in textwrap.wrap(why.sentence, max(20, width))]


def advice_line(why: Why) -> str:
    """The sentence in a few words, first what to change, then the cause by its share; "" where there is none."""
    cause = next((each for each in why.causes if each not in OWN_WORK), None)
    if cause is None or not why.sentence:
        return ""
    change = why.sentence.partition(": ")[2].removesuffix(".")
    return f"{change} ({text.percent(why.causes[cause] / why.total_s)} {_CAUSES[cause].words})"


def cause_lines(why: Why, width: int, *, lettered: bool = False, pointed: Cause | None = None) -> list[Content]:
    """The bar, each cause, and the sentence; nothing where no time passed. pointed: the cause to highlight."""
    if not _shown(why):
        return []
    bar = cause_bar(why, width, lettered=lettered)
    return [bar, *cause_list(why, lettered=lettered, pointed=pointed), *advice_lines(why, width)]


def _shown(why: Why) -> dict[Cause, float]:
    if why.total_s < _MIN_S:
        return {}
    return {cause: spent for cause, spent in why.causes.items() if spent >= why.total_s * _MIN_SHARE}


def _fill(cause: Cause, lettered: bool) -> str:
    return _CAUSES[cause].letter if lettered else _CAUSES[cause].fill


# By phase.

_NAME = 11
_COLUMN = 8
_PHASES = (("queue", "$request-queued", "q"), ("prefill", "$request-prefill", "p"), ("decode", "$request-decode", "d"))


class Room(NamedTuple):
    """The room of a panel. lettered: parts of a bar are marked by letters, where blocks or colours are lacking."""

    width: int
    ascii_only: bool = False
    lettered: bool = False


def room_of(app: App[object], width: int) -> Room:
    """Return a room of that width in the terminal of an app."""
    return Room(width, is_ascii(app), is_lettered(app))


def latency_breakdown(snapshot: Snapshot, room: Room) -> Iterator[Content]:
    """Yield percentiles and share of queue, prefill and decode of the answers of the session."""
    insight = snapshot.insight
    spreads = {"queue": insight.queue, "prefill": insight.prefill, "decode": insight.decode}
    spent = {name: (spread.mean or 0.0) * spread.count for name, spread in spreads.items()}
    total = sum(spent.values())
    header = "".join(f"{name:>{_COLUMN}}" for name in ("p50", "p90", "p99", "mean", "share"))
    yield Content.styled(f"{'':<{_NAME}}{header}", "$muted")
    for name, style, letter in _PHASES:
        share = text.share(spent[name] / total) if total else "–"
        yield _phase(letter if room.lettered else "■", name, style, spreads[name], share)
    if total:
        parts = [BarSegment(spent[name], style, letter) for name, style, letter in _PHASES]
        yield stack(parts, room.width, ascii_only=room.lettered)


def _phase(mark: str, name: str, style: str, spread: Spread, share: str) -> Content:
    numbers = (text.seconds(value) for value in (spread.p50, spread.p90, spread.p99, spread.mean))
    cells = "".join(f"{number:>{_COLUMN}}" for number in (*numbers, share))
    return Content.assemble((f"{mark} ", style), (f"{name:<{_NAME - 2}}", "$muted"), cells)
