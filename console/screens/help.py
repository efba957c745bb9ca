"""Help: every key that works on the screen beneath, and what the numbers mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from console.commands import Entry, entries

_TERM = 14
_MEANING = 52
NUMBERS: tuple[tuple[str, str], ...] = (
    ("tok/s", "tokens generated per second, all workers together"),
    ("TTFT", "time to first token: from a request's arrival to its first word"),
    ("ITL", "inter-token latency: the wait between two tokens of one answer"),
    ("p50, p95", "half of them, 95 of 100 of them, were this fast or faster"),
    ("queue", "requests that wait for a worker"),
    ("KV", "pages of keys and values in use: the memory of the texts being worked on"),
    ("prefix hits", "share of prompt tokens found computed already"),
    ("active", "requests a worker works on now, of those it may: max prompts, or fewer where memory ran out"),
    ("workers", "copies of the model, each on its own device"),
    ("max prompts", "how many requests one worker takes at a time: more means more tok/s and a longer ITL"),
    ("weights", "the model itself"),
    ("work", "what computing needs besides weights and KV"),
    ("others", "memory held by other programs"),
    ("planned, used", "what a worker was expected to take of a device, and what its load really took"),
    ("simulated", "a device that is only kept account of: its workers compute on the CPU"),
    ("SIM0+1", "a worker whose layers lie on both devices"),
    ("memory allows", "as many prompts as a worker could work on when its memory ran out"),
    ("length", "the answer was cut at its token limit"),
)


class HelpScreen(ModalScreen[None]):
    """behind: the screen whose keys are explained."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close", id="help.close", tooltip="Close the help", show=False),
    ]

    def __init__(self, behind: Screen[Any]) -> None:
        super().__init__()
        self._entries = list(entries(behind))

    def compose(self) -> ComposeResult:
        """Keys first, numbers below."""
        with VerticalScroll(classes="dialog help") as page:
            page.border_title = "Keys and numbers"
            page.border_subtitle = "esc closes"
            yield Static(Content("\n").join([*_keys(self._entries), Content(""), *_numbers()]))


def _keys(found: list[Entry]) -> Iterator[Content]:
    here = [entry for entry in found if not entry.active.binding.action.startswith("app.")]
    everywhere = [entry for entry in found if entry not in here]
    for title, group in (("On this screen", here), ("Everywhere", everywhere)):
        if group:
            yield Content.styled(title, "bold $primary")
            yield from (_line(entry.keys, entry.title) for entry in group)
            yield Content("")
    yield _line("↑ ↓ or j k", "Move in a table, enter opens a row; tab goes to the next panel")
    yield _line("^p", "The palette: every command by name")


def _numbers() -> Iterator[Content]:
    yield Content.styled("What the numbers mean", "bold $primary")
    yield from (_line(name, meaning) for name, meaning in NUMBERS)


def _line(term: str, meaning: str) -> Content:
    first, *rest = textwrap.wrap(meaning, _MEANING)
    lines = "".join(f"\n{' ' * (_TERM + 2)}{more}" for more in rest)
    return Content.assemble((f"  {term:<{_TERM}}", "bold $accent"), first, lines)
