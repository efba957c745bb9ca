"""The box for a model that is not in the table: a folder, or a hub id to be fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input


class HubBox(Input):
    """Enter loads what was typed, ctrl+l only fetches it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+l,ctrl+t", "fetch", "Fetch only", id="models.fetch", tooltip="Fetch a hub id and load nothing"),
    ]

    @dataclass
    class Asked(Message):
        """A name was typed."""

        name: str
        fetch_only: bool

    def __init__(self) -> None:
        super().__init__(placeholder="A folder or org/name. Enter loads it, ctrl+l only fetches it.", id="other")

    async def action_submit(self) -> None:
        """Load it."""
        self._ask(fetch_only=False)

    def action_fetch(self) -> None:
        """Fetch it."""
        self._ask(fetch_only=True)

    def _ask(self, *, fetch_only: bool) -> None:
        if name := self.value.strip():
            self.value = ""
            self.post_message(self.Asked(name, fetch_only))
