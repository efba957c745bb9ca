"""Help: the keys that work here and now, and what the numbers mean."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Input, Static

from console.tui.commands import help_entries
from console.tui.screens.base import Dialog
from console.tui.widgets.glyphs import for_terminal

_TERM = 16
_MEANING = 50
Matches = Callable[..., bool]
"""Of texts: each word of the filter is in one of them."""
NUMBERS: tuple[tuple[str, str], ...] = (
    ("tok/s", "tokens generated per second, all workers together"),
    ("TTFT", "time to first token: from a request's arrival to its first token"),
    ("ITL", "inter-token latency: time between two tokens of an answer"),
    ("p50, p95", "50% or 95% of the samples were this fast or faster"),
    ("queue", "requests waiting for a slot on a worker"),
    ("KV", "KV cache pages in use: memory of running prompts and answers"),
    ("prefix hits", "share of prompt tokens found in the prefix cache"),
    ("active", "running requests of a worker, of its slots: max prompts, or fewer if memory ran out"),
    ("workers", "copies of the model, each on its own device"),
    ("max prompts", "concurrent requests per worker: more means more tok/s and a longer ITL"),
    ("weights", "the model itself"),
    ("work", "working memory: needed in addition to weights and KV cache"),
    ("others", "memory used by other programs"),
    ("planned, used", "memory of a worker: estimated, and measured after its load"),
    ("simulated", "simulated device: its workers compute on the CPU"),
    ("SIM0+1", "a worker with layers on both devices"),
    ("memory allows", "slots of a worker when its memory ran out"),
    ("length", "the answer was cut at its token limit"),
)


class HelpScreen(Dialog[None]):
    """behind: the screen whose keys are explained."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Filter", id="help.filter", tooltip="Show only lines with a word", key_display="/"),
        Binding(
            "escape,question_mark,q", "dismiss", "Close", id="help.close", tooltip="Close the help", key_display="esc"
        ),
    ]

    def __init__(self, behind: Screen[Any]) -> None:
        super().__init__()
        self._behind = behind
        self._entries = sorted(help_entries(behind), key=lambda each: self._order(each.node, moves=each.moves))

    def compose(self) -> ComposeResult:
        """Keys first, numbers below."""
        with VerticalScroll(classes="dialog help") as page:
            page.border_title = "Keys and numbers"
            page.border_subtitle = "click to run"
            yield Input(placeholder="/ filter", compact=True)
            yield Static(self._lines(""), markup=False)

    def action_find(self) -> None:
        """Type a word."""
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as it is typed."""
        event.stop()
        self.query_one(Static).update(self._lines(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Back to the page, filter kept."""
        event.stop()
        self.query_one(VerticalScroll).focus()

    def _lines(self, words: str) -> Content:
        """The lines with each of the words."""
        wanted = words.lower().split()

        def matches(*texts: str) -> bool:
            return all(word in " ".join(texts).lower() for word in wanted)

        lines = [*self._keys(matches), Content(""), *_numbers(matches)]
        return for_terminal(self.app, Content("\n").join(lines))

    def action_take(self, at: int) -> None:
        """Close, and do what was clicked."""
        chosen = self._entries[at]
        self.dismiss()
        self.app.call_later(self.app.run_action, chosen.action, chosen.node)

    def _keys(self, matches: Matches) -> Iterator[Content]:
        """Those of the panel with the focus, then the screen's, then the console's."""
        found = [(at, each) for at, each in enumerate(self._entries) if matches(each.keys, each.title)]
        for title, group in itertools.groupby(found, lambda each: self._place(each[1].node)):
            yield Content.styled(title, "bold $primary")
            for at, entry in group:
                yield _line(entry.keys, entry.title, Style.from_meta({"@click": f"screen.take({at})"}))
            yield Content("")
        if len(self._behind.focus_chain) > 1 and matches("tab next panel"):
            yield _line("tab", "Go to the next panel")
        palette = self._behind.active_bindings.get(self.app.COMMAND_PALETTE_BINDING)
        if palette is not None and matches("command palette"):
            yield _line(self.app.get_key_display(palette.binding), "Command palette")

    def _place(self, node: DOMNode) -> str:
        """Return the title of a group."""
        if node is self.app:
            return "Everywhere"
        if node is self._behind:
            return "This dialog" if self._behind.is_modal else "This screen"
        return "This panel"

    def _order(self, node: DOMNode, *, moves: bool) -> tuple[int, bool]:
        """Return the place of a key: the panel's first, and in a group those that only move about last."""
        return (2 if node is self._behind.app else 1 if node is self._behind else 0, moves)


def _numbers(matches: Matches) -> Iterator[Content]:
    yield Content.styled("What the numbers mean", "bold $primary")
    yield from (_line(name, meaning) for name, meaning in NUMBERS if matches(name, meaning))


def _line(term: str, meaning: str, link: Style | None = None) -> Content:
    first, *rest = textwrap.wrap(meaning, _MEANING)
    lines = "".join(f"\n{' ' * (_TERM + 2)}{more}" for more in rest)
    content = Content(f"{first}{lines}")
    return Content.assemble((f"  {term:<{_TERM}}", "bold $accent"), content if link is None else content.stylize(link))
