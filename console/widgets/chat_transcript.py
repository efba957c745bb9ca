"""The transcript: the turns of one conversation, kept at its end unless the operator scrolled away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Button, Static

from console.chats import Turn
from console.widgets.chat_turn import Answer, Question

SHOWN_TURNS = 40


class ChatTranscript(VerticalScroll, can_focus=True):
    """Shows the last turns of a conversation, and the earlier ones when asked."""

    DEFAULT_CSS = """
    ChatTranscript {
        layout: stream;
        height: 1fr;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        & > .empty { padding: 1 2; color: $text-muted; }
        & > #earlier { width: 100%; margin: 0; }
    }
    """

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self._turns: Sequence[Turn] = ()
        self.border_title = "Chat"

    async def show(self, turns: Sequence[Turn], *, hint: str) -> None:
        """Replace what is shown; `hint` is said where there is nothing yet."""
        self._turns = turns
        await self._mount(turns[-SHOWN_TURNS:], earlier=max(0, len(turns) - SHOWN_TURNS), hint=hint)

    async def add_question(self, text: str) -> None:
        """Put a question at the end."""
        for placeholder in self.query(".empty"):
            await placeholder.remove()
        await self.mount(Question(text))
        self._follow()

    async def add_answer(self) -> Answer:
        """Put an answer that will grow at the end."""
        answer = Answer()
        await self.mount(answer)
        self._follow()
        return answer

    async def drop_last_answer(self) -> None:
        """Take the last answer off the screen, if the last turn is one."""
        children = list(self.children)
        if children and isinstance(children[-1], Answer):
            await children[-1].remove()

    async def on_button_pressed(self, event: Button.Pressed) -> None:
        """Show everything."""
        event.stop()
        await self._mount(self._turns, earlier=0, hint="")

    async def _mount(self, turns: Sequence[Turn], *, earlier: int, hint: str) -> None:
        await self.remove_children()
        widgets: list[Widget] = []
        if earlier:
            widgets.append(Button(f"Show {earlier} earlier turns", id="earlier", compact=True))
        widgets += [
            Question(turn.content) if turn.role == "user" else Answer(turn.content, turn.note) for turn in turns
        ]
        if not widgets:
            widgets.append(Static(hint, classes="empty", markup=False))
        await self.mount_all(widgets)
        self._follow()

    def _follow(self) -> None:
        """Keep the end in sight from now on."""
        self.anchor(False)
        self._keep_end()

    def watch_virtual_size(self) -> None:
        """The text grew: once it is longer than the panel, its end is what is shown."""
        self._keep_end()

    def _keep_end(self) -> None:
        """Anchoring text that is shorter than its panel would hang it from the bottom."""
        if not self.is_anchored and self.virtual_size.height > self.size.height > 0:
            self.anchor()
