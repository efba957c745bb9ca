"""The program's log: what its own thread writes is what was said when it was said."""

from __future__ import annotations

import logging
from pathlib import Path

from console.logs import logging_to
from engine.log import LogRing


def test_a_line_is_written_as_it_was_when_it_was_said(tmp_path: Path) -> None:
    ring, changing = LogRing(), ["before"]
    with logging_to(ring, tmp_path, verbose=False, stderr=False):
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
