"""How the end of a worker is told."""

from __future__ import annotations

import pytest

from engine.worker_process.hosts import WorkerExit
from engine.workers.health import describe_exit

_CRASH = """loading
Fatal Python error: Segmentation fault

Current thread 0x00007f0ca2fb4cd0 (most recent call first):
  File "loop.py", line 1 in run

Extension modules: a._b, c._d (total: 2)
"""


@pytest.mark.parametrize(
    ("exit_", "told"),
    [
        (WorkerExit(code=1, log_tail="Traceback\nValueError: no\n"), "worker w0 exited with code 1: ValueError: no"),
        (WorkerExit(signal="SIGTERM"), "worker w0 was killed by SIGTERM"),
        (WorkerExit(signal="SIGKILL"), "worker w0 was killed by SIGKILL (probably out of memory)"),
        (
            WorkerExit(signal="SIGBUS", log_tail="Fatal Python error: Bus error\n"),
            "worker w0 was killed by SIGBUS (probably a weight file was truncated during reading): "
            "Fatal Python error: Bus error",
        ),
        (
            WorkerExit(signal="SIGSEGV", log_tail=_CRASH),
            "worker w0 was killed by SIGSEGV: Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_an_end_is_one_sentence_with_the_line_that_says_most(exit_: WorkerExit, told: str) -> None:
    assert describe_exit("w0", exit_) == told
