"""The box a question is typed into: Enter sends, ctrl+j makes a new line, up brings the last question back."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from console.chats import Turn

ASKING = "Ask something. Enter sends, ctrl+j is a new line."


class ChatInput(TextArea):
    """Grows with its text, up to a third of the screen. editing: the question that is being asked otherwise."""

    DEFAULT_CSS = """
    ChatInput {
        height: auto;
        min-height: 3;
        max-height: 33vh;
        border: round $border-blurred;
        border-title-color: $warning;
        background: $background;
        padding: 0 1;
        &:focus { border: round $primary; }
        & .text-area--cursor-line { background: $background; }
    }
    .-ascii ChatInput { border: ascii $border-blurred; }
    """

    @dataclass
    class Submitted(Message):
        """A question was sent. Whoever takes it clears the box; a question nobody takes stays in it."""

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
        self.border_title = "Edit the question: enter asks it as a new branch, esc leaves it" if question else None
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(self.Submitted(self.text.strip(), self.editing))
        elif event.key in ("ctrl+j", "shift+enter"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "up" and not self.text and self.last_question:
            event.stop()
            event.prevent_default()
            self.text = self.last_question
            self.move_cursor(self.document.end)
