"""The box a question is typed into: Enter sends, ctrl+j makes a new line, up brings the last question back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea

from console.chats import Turn
from console.link.chat import DraftCount
from console.link.status import CHAT
from console.tui.keymap import ConsoleBinding
from console.tui.widgets.glyphs import for_terminal

# The line between transcript and box: what the draft takes of the context, and what else can be done, to click.

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
    line = f"{count.history:,} + {count.draft:,}" if count.draft else f"{count.history:,}"
    if not count.context:
        return f"{line} tokens", False
    line = f"{line} of {count.context:,} tokens"
    if count.left <= 0:
        return f"{line} · {1 - count.left:,} over", True
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
        """None: no model can count."""
        line, warning = count_line(count, max_tokens) if count is not None else ("", False)
        self.set_class(warning, "-warning")
        count_now = for_terminal(self.app, Content(("▲ " if warning else "") + line))
        self.query_one("#count", Static).update(count_now, layout=False)


ASKING = "Message. Enter sends, ctrl+j starts a new line."
TYPING = "Typing"
READING = "Reading: arrows scroll, shift+arrows select, a letter types"
EDITING = "Edit the question: enter sends it as a new branch, esc cancels"


class ChatInput(TextArea):
    """Grows with its text, up to a third of the screen. editing: the question that is being asked otherwise."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "enter",
            "send",
            "Send",
            id="chat.send",
            mutates=True,
            call=CHAT,
            tooltip="Send the question",
            priority=True,
            primary=True,
        ),
    ]
    DEFAULT_CSS = """
    ChatInput {
        height: auto;
        min-height: 3;
        max-height: 33vh;
        border: round $border-blurred;
        border-title-color: $muted;
        &.-editing { border-title-color: $warning; }
        background: $background;
        padding: 0 1;
        &:focus { border: round $primary; }
        & .text-area--cursor-line { background: $background; }
    }
    .-ascii ChatInput { border: ascii $border-blurred; }
    """

    @dataclass
    class Submitted(Message):
        """A question was taken out of the box. Its receiver sends it, or puts it back."""

        text: str
        editing: Turn | None

    def __init__(self) -> None:
        super().__init__(highlight_cursor_line=False, placeholder=ASKING)
        self.cursor_blink = False  # twice a second a part of the screen would be drawn, and sent over ssh, for it
        self.last_question = ""
        self.editing: Turn | None = None

    def ask_otherwise(self, question: Turn | None) -> None:
        """Ask a question otherwise; None leaves that."""
        self.editing = question
        self.text = question.content if question is not None else ""
        self._show_mode(types=self.has_focus)
        self.move_cursor(self.document.end)

    def on_focus(self) -> None:
        """Say what the keys do."""
        self._show_mode(types=True)

    def on_blur(self) -> None:
        """Say what the keys do elsewhere."""
        self._show_mode(types=False)

    def _show_mode(self, *, types: bool) -> None:
        """Say in the frame whether keys type or act on the conversation."""
        self.set_class(self.editing is not None, "-editing")
        self.border_title = EDITING if self.editing is not None else TYPING if types else READING

    def put_back(self, question: Submitted) -> None:
        """Put a question that was not sent back, before what was typed since."""
        typed = self.text
        self.ask_otherwise(question.editing or self.editing)
        self.text = f"{question.text}\n{typed}" if typed else question.text
        self.move_cursor(self.document.end)

    def action_send(self) -> None:
        """Take the question out and post it, once the keys before this one have been typed."""
        self.call_later(self._take)

    def _take(self) -> None:
        if self.text.strip():
            self.post_message(self.Submitted(self.text, self.editing))
            self.ask_otherwise(None)

    async def _on_key(self, event: events.Key) -> None:
        if event.key in ("ctrl+j", "shift+enter"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "up" and not self.text and self.last_question:
            event.stop()
            event.prevent_default()
            self.text = self.last_question
            self.move_cursor(self.document.end)
