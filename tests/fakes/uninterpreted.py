"""A process in which Triton compiles its kernels, while those of the tests are interpreted. It takes seconds to start,
and then runs one program after the other.

Each line of stdin names a module and the arguments of its `main`, as JSON; the answer is a line with what it printed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Compiles = Callable[..., list[str]]
"""Runs a module with arguments there, and returns the lines that it printed."""

_ROOT = Path(__file__).parents[2]


@contextmanager
def uninterpreted(cache: Path) -> Iterator[Compiles]:
    """Start it. cache: folder of what Triton has compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.uninterpreted"],
        cwd=_ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        given, printed = process.stdin, process.stdout

        def run(module: str, *arguments: object) -> list[str]:
            print(json.dumps([module, list(map(str, arguments))]), file=given, flush=True)
            line = printed.readline()
            assert line, "the process of the kernels has ended"
            answer = json.loads(line)
            assert not answer["error"], answer["error"]
            return str(answer["printed"]).splitlines()

        try:
            yield run
        finally:
            process.kill()


def _main() -> None:
    for line in sys.stdin:
        module, arguments = json.loads(line)
        said, error = io.StringIO(), ""
        with contextlib.redirect_stdout(said):
            try:
                importlib.import_module(module).main(arguments)
            except Exception:
                error = traceback.format_exc()
        print(json.dumps({"printed": said.getvalue(), "error": error}), flush=True)


if __name__ == "__main__":
    _main()
