"""The list of conversations, the latest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from console.chats import Conversation


class ChatList(OptionList):
    """Enter opens a conversation, d deletes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d,delete", "delete", "Delete", id="chat.delete", tooltip="Delete the selected conversation"),
    ]

    DEFAULT_CSS = """
    ChatList { width: 30; height: 1fr; scrollbar-size-vertical: 1; text-wrap: nowrap; text-overflow: ellipsis; }
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
        self.add_options([Option(Content(chat.title or "New conversation"), id=str(chat.id)) for chat in conversations])
        ids = [chat.id for chat in conversations]
        if current in ids:
            self.highlighted = ids.index(current)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click."""
        event.stop()
        self.post_message(self.Opened(int(event.option_id or 0)))

    def action_delete(self) -> None:
        """d."""
        if self.highlighted is not None:
            chat = self._shown[self.highlighted]
            self.post_message(self.DeleteAsked(chat.id, chat.title or "New conversation"))
