"""InsightPanel: a titled panel as high as what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual.content import Content
from textual.widgets import Static

from console.widgets.glyphs import fitted, is_ascii, is_lettered
from console.widgets.insight_words import Room
from engine.snapshot import Snapshot

_LEAST_CELLS = 30


class InsightPanel(Static):
    """words: the lines for a snapshot, in the room that there is."""

    DEFAULT_CSS = """
    InsightPanel { height: auto; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, title: str, words: Callable[[Snapshot, Room], Iterable[Content]], *, id: str) -> None:
        super().__init__(id=id, classes="panel", markup=False)
        self.border_title = title
        self._words = words
        self._snapshot: Snapshot | None = None
        self._said = Content("")

    def show(self, snapshot: Snapshot) -> None:
        """Say it anew, where anything changed."""
        self._snapshot = snapshot
        room = Room(max(_LEAST_CELLS, self.content_size.width), is_ascii(self.app), is_lettered(self.app))
        said = fitted(self.app, Content("\n").join(self._words(snapshot, room)))
        if not said.is_same(self._said):
            higher = said.plain.count("\n") != self._said.plain.count("\n")
            self._said = said
            self.update(said, layout=higher)

    def on_resize(self) -> None:
        """Charts are drawn to the width."""
        if self._snapshot is not None:
            self.show(self._snapshot)
