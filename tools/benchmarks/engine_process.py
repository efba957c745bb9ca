"""An engine's runner in a process of its own, which computes only while it is asked to."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from tools.benchmarks.places import ROOT, environment
from tools.benchmarks.protocol import About, Done, Load, Work

START_TIMEOUT_S = 1200.0
WORK_TIMEOUT_S = 900.0


class EngineFailed(Exception):
    """An engine answered with an error."""


class EngineProcess:
    """Started with its model loaded. Between works it is stopped, so that threads which spin while they wait take
    nothing from the engine whose turn it is."""

    def __init__(self, command: Sequence[str], more: Mapping[str, str], log: Path) -> None:
        """more: variables of its environment.  log: where it says whatever it says.  Raises EngineFailed."""
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment(dict(more)),
            process_group=0,  # ctrl+c of the driver is not theirs; of its session, as neighbours in it are
        )
        try:
            self.about = About(**self._answer(START_TIMEOUT_S)["about"])
        except BaseException:  # a signal that ends the run leaves no engine behind either
            self.close()
            raise

    def do(self, work: Work | Load) -> Done:
        """Raises EngineFailed, also for a work of which fewer or more tokens came than were asked for."""
        self.resume()
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(work.line() + "\n")
            _pipe(self._process.stdin).flush()
        done = Done(**self._answer(WORK_TIMEOUT_S))
        if isinstance(work, Work) and done.tokens != (asked := len(work.prompts) * work.output_tokens):
            raise EngineFailed(f"generated {done.tokens} tokens of {asked}")
        return done

    def pause(self) -> None:
        """Keep it and its children from running."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Let it run."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """End it and its children."""
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        output = _pipe(self._process.stdout)
        if not select.select([output], [], [], timeout_s)[0]:
            raise EngineFailed(f"no answer in {timeout_s:.0f} s")
        line = output.readline()
        if not line:
            raise EngineFailed(f"ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
