"""The causes of the time of requests: one bar, its causes in words, and what to change. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

from textual.content import Content

from console import text
from engine.requests.causes import Cause, Why


class _Look(NamedTuple):
    """A cause in words, what fills it in the bar, also without block characters and colours, and its colour."""

    words: str
    fill: str
    letter: str
    style: str


_CAUSES: Mapping[Cause, _Look] = MappingProxyType(
    {
        "slot": _Look("waiting for a slot", ".", "S", "$request-queued"),
        "pages": _Look("waiting for KV pages", "░", "K", "$warning"),
        "step_tokens": _Look("waiting for step tokens", "░", "T", "$warning"),
        "prompts": _Look("sharing steps with other prompts", "▒", "P", "$accent"),
        "preempted": _Look("preempted", "▓", "X", "$request-failed"),
        "slow_worker": _Look("slower worker than its peers", "▓", "W", "$request-failed"),
        "client": _Look("client reading the end", "░", "C", "$accent"),
        "grammar": _Look("grammar compile", "▒", "G", "$warning"),
        "load": _Look("model load", "▒", "L", "$worker-loading"),
        "swap": _Look("model swap", "▒", "M", "$worker-loading"),
        "lost_worker": _Look("lost worker", "▓", "D", "$request-failed"),
        "prefill": _Look("own prefill", "─", "-", "$request-prefill"),
        "decode": _Look("own decode", "━", "=", "$request-decode"),
    }
)

_MIN_S = 1e-6
"""Nothing took less; a part of such a time, as it may come from elsewhere, is not a number."""

_MIN_SHARE = 0.005
"""What took less is left out."""

_CAUSE_CELLS = 34


def cause_bar(why: Why, width: int, *, lettered: bool = False) -> Content:
    """All of the time by cause, in `width` cells. lettered: where block characters or colours are lacking."""
    shown = _shown(why)
    ends = [round(end / why.total_s * width) for end in accumulate(shown.values())]
    cells = [end - begin for begin, end in pairwise((0, *ends))]
    return Content.assemble(
        *((_fill(cause, lettered) * each, _CAUSES[cause].style) for cause, each in zip(shown, cells, strict=True))
    )


def cause_list(why: Why, *, lettered: bool = False) -> Iterator[Content]:
    """Each cause with its seconds and share, the largest first."""
    for cause, spent in _shown(why).items():
        yield Content.assemble(
            (f"{_fill(cause, lettered)} ", _CAUSES[cause].style),
            f"{_CAUSES[cause].words:<{_CAUSE_CELLS}}",
            f"{text.seconds(spent):>9}",
            (f"{text.percent(spent / why.total_s):>6}", "$muted"),
        )


def advice_lines(why: Why, width: int) -> list[Content]:
    """The sentence on what to change."""
    return [Content.styled(line, "$warning") for line in textwrap.wrap(why.sentence, max(20, width))]


def cause_lines(why: Why, width: int, *, lettered: bool = False) -> list[Content]:
    """The bar, each cause, and the sentence; nothing where no time passed."""
    if not _shown(why):
        return []
    bar = cause_bar(why, width, lettered=lettered)
    return [bar, *cause_list(why, lettered=lettered), *advice_lines(why, width)]


def _shown(why: Why) -> dict[Cause, float]:
    if why.total_s < _MIN_S:
        return {}
    return {cause: spent for cause, spent in why.causes.items() if spent >= why.total_s * _MIN_SHARE}


def _fill(cause: Cause, lettered: bool) -> str:
    return _CAUSES[cause].letter if lettered else _CAUSES[cause].fill
