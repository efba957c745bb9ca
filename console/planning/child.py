"""A module in a child process that answers each line on stdin with a line on stdout."""

from __future__ import annotations

import asyncio
import sys

from engine.errors import WorkerFailed
from engine.system.child_process import python_command
from engine.worker_process.process import worker_environment


class Child:
    """The process. name: for error messages, as "the server"."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str) -> Child:
        """Run a module with arguments."""
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(),
        )
        return cls(name, process)

    async def line(self) -> bytes:
        """The next line of its output. Raises WorkerFailed, with the last line of stderr, where it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            return line
        _, stderr = await self._process.communicate()
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise WorkerFailed(f"{self._name} ended: {last}")

    async def ask(self, line: bytes) -> bytes:
        """Send a line and return the answer. Raises WorkerFailed as `line` does."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        return await self.line()

    async def end(self, *, kill: bool) -> None:
        """Close its stdin, at which it exits, and wait. kill: kill it first."""
        assert self._process.stdin is not None
        if kill and self._process.returncode is None:
            self._process.kill()
        self._process.stdin.close()
        await self._process.communicate()


def say(line: bytes) -> None:
    """Write an answer, in the child."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
