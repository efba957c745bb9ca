"""The log's last lines and those of them that are wanted: by level, source and word. Pure.

Adding costs as much as what is added; only another filter looks at all lines again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from console.text import local_time
from engine.snapshot import LogEntry
from engine.text.printable import printable, printable_lines

MAX_LINES = 5000
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
ACCESS = "access"
"""The source of access lines, one for each HTTP request."""
_TAB_CELLS = 4
LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warn", logging.ERROR: "error"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines are shown. word: any case; source: "" for all.

    access: with the access lines of the API, one for each request, which would bury all others; as the only source,
    they are always shown.
    """

    level: int = logging.DEBUG
    source: str = ""
    word: str = ""
    access: bool = False

    def passes(self, source: str, level: int) -> bool:
        """Return whether lines of a source and a level are shown, whatever is in them."""
        if source == ACCESS and not self.access and self.source != ACCESS:
            return False
        return level >= self.level and (not self.source or source == self.source)


@dataclass(slots=True, eq=False)
class Line:
    """One line of the log. source: its part of the program; sought: what a word is looked for in.

    row, rows: for drawing: the first row, and the line wrapped to `width` cells.
    """

    entry: LogEntry
    source: str
    message: str
    sought: str
    row: int = 0
    rows: tuple[str, ...] = ()
    width: int = 0


class LogLines:
    """The newest `limit` lines, and which of them are wanted."""

    def __init__(self, limit: int = MAX_LINES) -> None:
        self._limit = limit
        self._lines: deque[Line] = deque()
        self._shown: deque[Line] = deque()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._wanted = Wanted()

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def shown(self) -> deque[Line]:
        """The lines that are wanted, oldest first. Not to be changed."""
        return self._shown

    @property
    def wanted(self) -> Wanted:
        """The filter."""
        return self._wanted

    def sources(self) -> tuple[tuple[str, int], ...]:
        """How many lines each source has, by name."""
        counts: Counter[str] = Counter()
        for (source, _), count in self._counts.items():
            counts[source] += count
        return tuple(sorted(counts.items()))

    def hidden(self) -> tuple[tuple[str, int], ...]:
        """How many lines are left out for their level, by its name, and how many are access lines."""
        wanted, levels, access = self._wanted, Counter[int](), 0
        for (source, level), count in self._counts.items():
            if source == ACCESS and not wanted.passes(ACCESS, logging.ERROR):
                access += count if not wanted.source else 0
            elif level < wanted.level and wanted.passes(source, logging.ERROR):
                levels[level] += count
        named = [(LEVEL_NAMES[level], count) for level, count in sorted(levels.items())]
        return (*named, (ACCESS, access)) if access else tuple(named)

    def add(self, entries: Sequence[LogEntry]) -> list[Line]:
        """Append lines, dropping the oldest beyond the limit; those that are wanted."""
        entries = entries[-self._limit :]
        for _ in range(len(self._lines) + len(entries) - self._limit):
            self._drop()
        added = []
        for entry in entries:
            line = _line(entry)
            self._lines.append(line)
            self._counts[line.source, level_of(entry)] += 1
            if self._is_wanted(line):
                self._shown.append(line)
                added.append(line)
        return added

    def clear(self) -> None:
        """Forget them all; what is wanted stays."""
        for lines in (self._lines, self._shown, self._counts):
            lines.clear()

    def want(
        self,
        *,
        level: int | None = None,
        source: str | None = None,
        word: str | None = None,
        access: bool | None = None,
    ) -> bool:
        """Change the filter; return whether that changed it."""
        before = self._wanted
        self._wanted = replace(
            before,
            level=before.level if level is None else level,
            source=before.source if source is None else source,
            word=before.word if word is None else word.casefold(),
            access=before.access if access is None else access,
        )
        if self._wanted == before:
            return False
        self._shown = deque(filter(self._is_wanted, self._lines))
        return True

    def has_below(self, level: int) -> bool:
        """Return whether there are lines below a level."""
        return any(each < level for _, each in self._counts)

    def as_text(self) -> Iterator[str]:
        """The lines that are wanted now, as the log file has them; each is written out when it is asked for."""
        return (line_text(line) for line in tuple(self._shown))

    def _drop(self) -> None:
        line = self._lines.popleft()
        counted = line.source, level_of(line.entry)
        self._counts[counted] -= 1
        if not self._counts[counted]:
            del self._counts[counted]
        if self._shown and self._shown[0] is line:
            self._shown.popleft()

    def _is_wanted(self, line: Line) -> bool:
        wanted = self._wanted
        return wanted.passes(line.source, level_of(line.entry)) and (not wanted.word or wanted.word in line.sought)


def source_of(logger: str) -> str:
    """Which part of the program a logger is of: "engine" for engine.worker_process.logs, "api" for
    console.api.requests.stream, "access" for api.access."""
    first, _, rest = logger.partition(".")
    if first == "api" and rest == ACCESS:
        return ACCESS
    return "api" if first == "console" and rest.partition(".")[0] == "api" else first or "other"


def level_of(entry: LogEntry) -> int:
    """The highest of LEVELS that its level reaches."""
    return max((level for level in LEVELS if level <= entry.level), default=logging.DEBUG)


def line_text(line: Line) -> str:
    """One line with its date, as the log file has it."""
    stamp = local_time(line.entry.at, "%Y-%m-%d %H:%M:%S")
    return f"{stamp} {logging.getLevelName(level_of(line.entry)):<7} {printable(line.entry.source)}: {line.message}"


def _line(entry: LogEntry) -> Line:
    message = printable_lines(entry.message.expandtabs(_TAB_CELLS)).strip()
    return Line(
        entry=entry,
        source=source_of(entry.source),
        message=message,
        sought=f"{entry.source} {message}".casefold(),
    )
