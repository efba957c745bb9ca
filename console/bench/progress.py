"""How far a benchmark is: one line redrawn on a terminal, elsewhere a line for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TextIO

from engine.text.printable import printable

Show = Callable[[str], None]
"""Says what is being measured now."""


class Showing(Protocol):
    """Says what is done now. detail: how far that is, for a line that is redrawn."""

    def __call__(self, text: str, detail: str = "") -> None: ...


class Progress:
    """Draws what is being measured."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._redraws = stream.isatty()
        self._width = 0
        self._text = ""

    def show(self, text: str, detail: str = "") -> None:
        """Say this in place of what was said before; where lines stay, only what is new, and without the detail."""
        if self._redraws:
            text = printable(f"{text}, {detail}" if detail else text)
            self._stream.write(f"\r{text:{self._width}}")
        elif text != self._text:
            self._stream.write(f"{printable(text)}\n")
        self._stream.flush()
        self._width, self._text = len(text), text

    def end(self) -> None:
        """Leave nothing of it on the terminal."""
        if self._redraws and self._width:
            self._stream.write(f"\r{'':{self._width}}\r")
            self._stream.flush()
