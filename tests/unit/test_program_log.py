"""The program's log: what its own thread writes is what was said when it was said."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from console.runtime.logs import logging_to
from console.tui.terminal import native_stderr_logged
from engine.system.log import LogRing


def test_a_line_is_written_as_it_was_when_it_was_said(tmp_path: Path) -> None:
    ring, changing = LogRing(), ["before"]
    with logging_to(ring, tmp_path):
        logging.getLogger("api").info("%s and %d", changing, 7)
        changing.append("after")
        try:
            raise ValueError("no such thing")
        except ValueError:
            logging.getLogger("api").exception("it broke with %s", changing)
    written = (tmp_path / "ericllm.log").read_text()
    assert "INFO    api: ['before'] and 7\n" in written
    assert "ERROR   api: it broke with ['before', 'after']\n" in written
    assert "ValueError: no such thing" in written
    assert ring.after(0)[1][0].message == "['before'] and 7"


def test_what_a_library_writes_to_stderr_itself_is_in_the_log_while_a_screen_is_drawn_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ring = LogRing()
    with logging_to(ring, None):
        with native_stderr_logged():
            os.write(2, b"thread panicked: \x1b]52;c;QQ==\x07\xff\n\n" + b"x" * 3000)
            print("the screen", file=sys.__stderr__, end="")
        os.write(2, b", and the terminal again")
    assert capfd.readouterr().err == "the screen, and the terminal again"
    lines = [line.message for line in ring.after(0)[1]]
    assert lines == [r"thread panicked: \x1b]52;c;QQ==\x07" + "\ufffd", "x" * 2000, "x" * 1000]
