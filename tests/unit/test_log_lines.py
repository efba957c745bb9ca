"""Lines of the log: which are kept, which are wanted, and how long ones are cut."""

from __future__ import annotations

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.tui.screens.logs.log_lines import LogLines, source_of
from console.tui.screens.logs.view import wrap_message
from engine.snapshot import LogEntry


def entry(message: str, *, level: int = logging.INFO, source: str = "engine") -> LogEntry:
    """A line at one moment."""
    return LogEntry(at=0.0, level=level, source=source, message=message)


def messages(lines: LogLines) -> list[str]:
    """What is shown."""
    return [line.message for line in lines.shown]


def test_the_newest_lines_are_kept_and_counted_by_source() -> None:
    lines = LogLines(limit=3)
    lines.add([entry(str(at), source=f"w{at % 2}") for at in range(4)])
    lines.add([entry("4", source="api")])
    assert messages(lines) == ["2", "3", "4"]
    assert lines.sources() == (("api", 1), ("w0", 1), ("w1", 1))
    lines.add([entry(str(at)) for at in range(10)])
    assert messages(lines) == ["7", "8", "9"]
    assert lines.sources() == (("engine", 3),)


def test_level_source_and_word_are_wanted_together() -> None:
    lines = LogLines()
    lines.add([entry("Slow step", level=logging.WARNING, source="w0"), entry("slow start", source="w0")])
    lines.add([entry("slow disk", level=logging.ERROR), entry("ready", level=logging.ERROR, source="w0")])
    lines.want(level=logging.WARNING, source="w0", word="SLOW")
    assert messages(lines) == ["Slow step"]
    (added,) = lines.add([entry("slow again", level=logging.ERROR, source="w0")])
    assert added.message == "slow again"
    assert lines.add([entry("slow again")]) == []
    lines.want(source="", word="")
    assert messages(lines) == ["Slow step", "slow disk", "ready", "slow again"]
    assert not lines.want(level=logging.WARNING)


def test_adding_looks_at_no_line_that_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LogLines(limit=1000)
    lines.want(word="x")
    lines.add([entry(f"x {at}") for at in range(1000)])
    looked = 0
    is_wanted = LogLines._is_wanted

    def counted(self: LogLines, line: object) -> bool:
        nonlocal looked
        looked += 1
        return is_wanted(self, line)  # type: ignore[arg-type]

    monkeypatch.setattr(LogLines, "_is_wanted", counted)
    lines.add([entry("x new"), entry("new")])
    assert looked == 2


def test_no_line_can_steer_the_terminal_on_the_screen_or_in_a_file() -> None:
    lines = LogLines()
    lines.add([entry("\x1b[31mred\x07 \talert\nnext\x9b\u202e", source="w0\x1b]52;c;QQ==\x07")])
    (line,) = lines.shown
    assert line.message == "\\x1b[31mred\\x07   alert\nnext\\x9b\\u202e"
    (text,) = lines.as_text()
    assert r"INFO    w0\x1b]52;c;QQ==\x07: \x1b[31mred" in text


def test_lines_as_text_are_those_of_the_log_file() -> None:
    lines = LogLines()
    lines.add([entry("port 8000 is taken", level=logging.ERROR, source="console.api.server"), entry("no")])
    lines.want(word="port")
    (text,) = lines.as_text()
    assert text.endswith(" ERROR   console.api.server: port 8000 is taken")


@pytest.mark.parametrize(
    ("logger", "source"),
    [
        ("engine", "engine"),
        ("engine.worker_process.logs", "engine"),
        ("w12", "w12"),
        ("api", "api"),
        ("api.access", "access"),
        ("console.api.requests.stream", "api"),
        ("console.runtime.runtime", "console"),
        ("", "other"),
    ],
)
def test_loggers_belong_to_parts_of_the_program(logger: str, source: str) -> None:
    assert source_of(logger) == source


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))), st.integers(min_value=20, max_value=60))
@example("\u0300", 20)
def test_rows_fit_and_lose_nothing_but_spaces_and_line_ends(message: str, width: int) -> None:
    rows = wrap_message(message, width)
    assert rows
    assert all(cell_len(row) <= width for row in rows)
    assert "".join("".join(rows).split()) == "".join(message.split())


def test_rows_are_cut_at_spaces_where_they_can_be() -> None:
    assert wrap_message("the batch took 297 milliseconds", 20) == ("the batch took 297", "milliseconds")
    assert wrap_message("x" * 45, 20) == ("x" * 20, "x" * 20, "x" * 5)
