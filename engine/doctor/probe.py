"""Probes of libraries, each in a child process: one that crashes, prints or hangs cannot take the asker with it.

`python -m engine.doctor.probe NAME [ARGUMENT]` imports one library and describes it, as one JSON object on stdout.
Whatever a library prints, natively too, goes to stderr: stdout is taken away before anything is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from engine.doctor.facts import Package
from engine.doctor.inspection import ProbeFailed, backend_doctors
from engine.errors import first_line
from engine.system.child_process import python_command
from engine.worker_process.process import signal_name, worker_environment

POLL_S = 0.1
T = TypeVar("T", bound=msgspec.Struct)


def ask(
    answer: type[T],
    *arguments: str,
    module: str = "engine.doctor.probe",
    timeout_s: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> T:
    """Run `python -m MODULE ARGUMENTS` and decode its answer. The doctor's probes take their name and what it is about.

    Raises ProbeFailed when it died, said nothing that makes sense, or was not done after `timeout_s` (or when
    `cancelled()` turned true); the child is gone then.
    """
    command = python_command("-m", module, *arguments)
    output = _run(command, timeout_s, cancelled)
    if not output:
        raise ProbeFailed("the check gave no answer")
    try:
        return msgspec.json.decode(output, type=answer)
    except msgspec.DecodeError as error:
        raise ProbeFailed(f"the check failed: {error}") from None


def _run(command: Sequence[str], timeout_s: float, cancelled: Callable[[], bool]) -> bytes:
    """Return what the command wrote to stdout."""
    deadline = time.monotonic() + timeout_s
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=worker_environment(),
    ) as process:
        while True:
            try:
                output, complaint = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline or cancelled():
                    _end(process)
                    raise ProbeFailed(f"it took longer than {timeout_s:g} s") from None
            except BaseException:
                _end(process)
                raise
    if process.returncode != 0:
        raise ProbeFailed(_how_it_ended(process.returncode, complaint))
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _how_it_ended(code: int, complaint: bytes) -> str:
    """The signal or the exit code, with the line of stderr that says most: Python's own of a crash, or the last."""
    lines = [line.strip() for line in complaint.decode(errors="replace").splitlines() if line.strip()]
    complaint_line = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
    how = f"importing it crashes with {signal_name(-code)}" if code < 0 else f"it exits with code {code}"
    return f"{how}: {complaint_line}" if complaint_line else how


def probe_package(name: str) -> Package:
    """Import any library: its version, or why that fails."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        return Package(installed=True, error=first_line(error))
    return Package(installed=True, version=str(getattr(module, "__version__", "")))


def find_probe(name: str) -> Callable[..., msgspec.Struct]:
    """Return the probe of any package, or that of a backend's doctor."""
    return probe_package if name == "package" else backend_doctors()[name].probe


def main(name: str, *arguments: str) -> None:
    """Write the answer to what stdout was."""
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, msgspec.json.encode(find_probe(name)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
