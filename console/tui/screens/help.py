"""Help: every key that works on the screen beneath, and what the numbers mean."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.style import Style
from textual.widgets import Static

from console.text import class_title
from console.tui.commands import entries
from console.tui.widgets.glyphs import for_terminal

_TERM = 14
_MEANING = 52
PALETTE_KEY = "^p"
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
        self._behind = behind
        self._entries = list(entries(behind, moving=True))

    def compose(self) -> ComposeResult:
        """Keys first, numbers below."""
        with VerticalScroll(classes="dialog help") as page:
            page.border_title = "Keys and numbers"
            page.border_subtitle = "a click does it, esc closes"
            lines = [*self._keys(), Content(""), *_numbers()]
            yield Static(for_terminal(self.app, Content("\n").join(lines)))

    def action_take(self, at: int) -> None:
        """Close, and do what was clicked."""
        chosen = self._entries[at]
        self.dismiss()
        self.app.call_later(self.app.run_action, chosen.action, chosen.node)

    def _keys(self) -> Iterator[Content]:
        """Those of what has the focus, then the screen's, then the console's."""
        for title, group in itertools.groupby(enumerate(self._entries), lambda each: self._place(each[1].node)):
            yield Content.styled(title, "bold $primary")
            for at, entry in group:
                yield _line(entry.keys, entry.title, Style.from_meta({"@click": f"screen.take({at})"}))
            yield Content("")
        yield _line("tab", "Go to the next panel")
        yield _line(PALETTE_KEY, "The palette: every command by name")

    def _place(self, node: DOMNode) -> str:
        if node is self.app:
            return "Everywhere"
        return "On this screen" if node is self._behind else f"Here, in the {class_title(type(node).__name__).lower()}"


def _numbers() -> Iterator[Content]:
    yield Content.styled("What the numbers mean", "bold $primary")
    yield from (_line(name, meaning) for name, meaning in NUMBERS)


def _line(term: str, meaning: str, link: Style | None = None) -> Content:
    first, *rest = textwrap.wrap(meaning, _MEANING)
    lines = "".join(f"\n{' ' * (_TERM + 2)}{more}" for more in rest)
    content = Content(f"{first}{lines}")
    return Content.assemble((f"  {term:<{_TERM}}", "bold $accent"), content if link is None else content.stylize(link))
