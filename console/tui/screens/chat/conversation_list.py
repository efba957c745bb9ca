"""The list of conversations, the latest first, with a field that finds them by title and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from console.chats import Conversation
from engine.text.printable import printable

QUIET_S = 0.15


class ChatList(OptionList):
    """Enter opens a conversation, the delete key deletes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("delete,ctrl+d", "delete", "Delete", id="chat.delete", tooltip="Delete the selected conversation"),
    ]

    DEFAULT_CSS = """
    ChatList { width: 1fr; height: 1fr; scrollbar-size-vertical: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    @dataclass
    class Opened(Message):
        """A conversation was chosen."""

        id: int

    @dataclass
    class DeleteAsked(Message):
        """A conversation should go."""

        id: int
        title: str

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self.border_title = "Conversations"
        self._shown: Sequence[Conversation] = ()

    def show(self, conversations: Sequence[Conversation], current: int | None) -> None:
        """Show them with `current` highlighted."""
        self._shown = conversations
        self.clear_options()
        self.add_options(
            [Option(Content(printable(chat.title) or "New conversation"), id=str(chat.id)) for chat in conversations]
        )
        ids = [chat.id for chat in conversations]
        if current in ids:
            self.highlighted = ids.index(current)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click."""
        event.stop()
        self.post_message(self.Opened(int(event.option_id or 0)))

    def action_delete(self) -> None:
        """Ask for the highlighted one to be deleted."""
        if self.highlighted is not None:
            chat = self._shown[self.highlighted]
            self.post_message(self.DeleteAsked(chat.id, chat.title or "New conversation"))


class ChatShelf(Vertical):
    """The list under its search field."""

    DEFAULT_CSS = """
    ChatShelf { width: 30; height: 1fr; }
    ChatShelf > Input.-textual-compact { padding: 0 2; background: $boost; }
    ChatShelf > Input.-hidden { display: none; }
    """

    @dataclass
    class Searched(Message):
        """Something else is looked for; "" is nothing."""

        text: str

    def __init__(self) -> None:
        super().__init__()
        self._quiet: Timer | None = None

    def compose(self) -> ComposeResult:
        """The field shows itself when something is looked for."""
        yield Input(placeholder="Search titles and text", compact=True, classes="-hidden")
        yield ChatList()

    @property
    def search(self) -> str:
        """The search words."""
        return self.query_one(Input).value.strip()

    @property
    def searching(self) -> bool:
        """True while the search field is shown."""
        return not self.query_one(Input).has_class("-hidden")

    def start_search(self) -> None:
        """Bring up the field."""
        field = self.query_one(Input)
        field.remove_class("-hidden")
        field.focus()

    def end_search(self) -> None:
        """All conversations again."""
        field = self.query_one(Input)
        field.value = ""
        field.add_class("-hidden")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Look once the typing rests."""
        event.stop()
        if self._quiet is not None:
            self._quiet.stop()
        self._quiet = self.set_timer(QUIET_S, lambda: self.post_message(self.Searched(self.search)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter goes to what was found."""
        event.stop()
        found = self.query_one(ChatList)
        found.focus()
        if found.highlighted is None and found.option_count:
            found.highlighted = 0
