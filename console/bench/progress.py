"""How far a benchmark is: one line redrawn on a terminal, elsewhere a line for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

Show = Callable[[str], None]
"""Says what is being measured now."""


class Progress:
    """Draws what is being measured."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._redraws = stream.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Say this in place of what was said before."""
        self._stream.write(f"\r{text:{self._width}}" if self._redraws else f"{text}\n")
        self._stream.flush()
        self._width = len(text)

    def end(self) -> None:
        """Leave nothing of it on the terminal."""
        if self._redraws and self._width:
            self._stream.write(f"\r{'':{self._width}}\r")
            self._stream.flush()
