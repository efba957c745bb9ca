"""How tuning goes, drawn as it grows: a block that is redrawn on a terminal, elsewhere a line for every window."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TextIO

from console.autotune.table import heading_of, progress_of, remarks_of, table_of
from console.links.tuning import TuningReport
from engine.text.printable import printable

_BESIDE = 10
"""Lines that are no rows of the table."""


class Live:
    """Draws reports. size: of the terminal, in columns and lines."""

    def __init__(self, stream: TextIO, size: Callable[[], os.terminal_size] = shutil.get_terminal_size) -> None:
        self._stream = stream
        self._size = size
        self._redraws = stream.isatty()
        self._drawn = 0
        self._told = -1
        self._notes = 0

    def say(self, text: str) -> None:
        """What is done before anything can be tried."""
        self._draw([text])

    def show(self, report: TuningReport) -> None:
        """How it stands."""
        if self._redraws:
            columns, lines = self._size()
            block = [*heading_of(report).splitlines(), "", progress_of(report)]
            block += remarks_of(report)[-1:]
            if report.tried:
                block += ["", *table_of(report, max(3, lines - _BESIDE), columns).splitlines()]
            self._draw(block)
        elif report.windows != self._told or len(report.notes) != self._notes:
            self._draw([*report.notes[self._notes :], progress_of(report)])
            self._told, self._notes = report.windows, len(report.notes)

    def end(self) -> None:
        """Leave nothing of it on the terminal."""
        self._draw([])

    def _draw(self, lines: list[str]) -> None:
        lines = [printable(line) for line in lines]
        if not self._redraws:
            self._stream.write("".join(f"{line}\n" for line in lines))
        else:
            columns, _ = self._size()
            back = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
            self._stream.write(back + "".join(f"{line[: columns - 1]}\n" for line in lines))
            self._drawn = len(lines)
        self._stream.flush()
