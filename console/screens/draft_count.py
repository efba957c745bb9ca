"""What the draft takes of the context: counted beside the screen's loop, once typing rests, and never twice at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from console.screens.chat_pane import Pane
from console.widgets.chat_input import ChatInput
from console.widgets.chat_line import ChatLine
from engine.errors import EngineError

QUIET_S = 0.2


class DraftCounter:
    """panes: those that would be asked; of two, the line tells of the one with less room."""

    def __init__(self, panes: Callable[[], Sequence[Pane]], box: ChatInput, line: ChatLine) -> None:
        self._panes = panes
        self._box = box
        self._line = line
        self._asked = asyncio.Event()
        self._model: object = None

    def ask(self) -> None:
        """Something changed: count anew soon."""
        self._asked.set()

    def model_is(self, model: object) -> None:
        """Count anew where that is another one than before."""
        if model != self._model:
            self._model = model
            self.ask()

    async def run(self) -> None:
        """Count whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(QUIET_S)
            self._asked.clear()
            await self._count()

    async def _count(self) -> None:
        text, editing = self._box.text.strip(), self._box.editing
        try:
            counts = [(await pane.count(text, editing), pane.branch.settings.max_tokens or 0) for pane in self._panes()]
        except EngineError:
            counts = []
        if not counts:
            self._line.show(None)
            return
        count, max_tokens = min(counts, key=lambda each: each[0].left - each[1])
        self._line.show(count, max_tokens or None)
