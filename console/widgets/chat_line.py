"""The line between transcript and box: what the draft takes of the context, and what else can be done, to click."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from console.links.conversation import DraftCount
from console.widgets.glyphs import fitted

NEAR = 0.1
"""Of the context: with less than that left for the answer, the line says how much."""
_ACTIONS = (
    ("search", "search"),
    ("rename", "rename"),
    ("presets", "presets"),
    ("split", "split"),
    ("export('md')", "export"),
)


def count_line(count: DraftCount, max_tokens: int | None = None) -> tuple[str, bool]:
    """ "312 + 48 of 8,192 tokens", and whether that is a warning: too little is left for the answer, or nothing."""
    line = f"{count.history:,} + {count.draft:,}"
    if not count.context:
        return f"{line} tokens", False
    line = f"{line} of {count.context:,} tokens"
    if count.left <= 0:
        return f"{line} · {1 - count.left:,} too many", True
    if count.left < (max_tokens if max_tokens is not None else count.context * NEAR):
        return f"{line} · {count.left:,} left for the answer", True
    return line, False


class ChatLine(Horizontal):
    """The count on the left, actions on the right."""

    DEFAULT_CSS = """
    ChatLine {
        height: 1;
        padding: 0 1;
        & > #count { width: 1fr; height: 1; color: $muted; text-wrap: nowrap; text-overflow: ellipsis; }
        & > #ways { width: auto; height: 1; margin-left: 2; link-color: $muted; link-style: none; }
        &.-warning > #count { color: $text-warning; }
    }
    """

    def compose(self) -> ComposeResult:
        """Nothing is counted yet."""
        yield Static("", id="count", markup=False)
        links = [Content.from_markup(f'[@click="screen.{action}"]$label[/]', label=label) for action, label in _ACTIONS]
        yield Static(Content("  ").join(links), id="ways")

    def show(self, count: DraftCount | None, max_tokens: int | None = None) -> None:
        """None: there is nobody who could count."""
        line, warning = count_line(count, max_tokens) if count is not None else ("", False)
        self.set_class(warning, "-warning")
        count_now = fitted(self.app, Content(("▲ " if warning else "") + line))
        self.query_one("#count", Static).update(count_now, layout=False)
