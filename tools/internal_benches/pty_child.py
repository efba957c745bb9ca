"""A program in a pseudo-terminal: its keys, its output, and the time of both."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

from engine.errors import WorkerFailed

_READ_BYTES = 1 << 16
_RECENT_BYTES = 1 << 18


class PtyChild:
    """Starts immediately; reads the output on the running event loop and keeps the end of it."""

    def __init__(self, command: Sequence[str], *, columns: int, rows: int, env: Mapping[str, str]) -> None:
        self.started_s = time.monotonic()
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        try:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env), start_new_session=True
            )
        finally:
            os.close(theirs)
        os.set_blocking(self._ours, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)
        self._recent = b""
        self._waiting: tuple[bytes, asyncio.Future[float]] | None = None
        self._closed = False

    @property
    def recent(self) -> str:
        """The end of its output, including escape sequences."""
        return self._recent.decode(errors="replace")

    def press(self, keys: bytes) -> None:
        """Send the bytes of key presses."""
        os.write(self._ours, keys)

    async def shown_s(self, text: str, keys: bytes = b"", timeout_s: float = 30.0) -> float:
        """Press keys and return the seconds until `text` is written. Raises WorkerFailed after the timeout."""
        self._recent = b""
        future: asyncio.Future[float] = self._loop.create_future()
        self._waiting = (text.encode(), future)
        began_s = time.monotonic()
        if keys:
            self.press(keys)
        try:
            async with asyncio.timeout(timeout_s):
                return await future - began_s
        except TimeoutError:
            raise WorkerFailed(f"the console did not show {text!r} within {timeout_s:g} s") from None
        finally:
            self._waiting = None

    async def ended_s(self, timeout_s: float = 30.0) -> float:
        """Wait for its end and return the time of it. Raises WorkerFailed after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(self.process.wait)
        except TimeoutError:
            raise WorkerFailed(f"the console did not end within {timeout_s:g} s") from None
        return time.monotonic()

    def close(self) -> None:
        """Kill it if it still runs, and close the terminal."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._ours)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)

    def _read(self) -> None:
        try:
            chunk = os.read(self._ours, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # the other end is closed
            chunk = b""
        if not chunk:
            self._loop.remove_reader(self._ours)
            return
        self._recent = (self._recent + chunk)[-_RECENT_BYTES:]
        if self._waiting is not None:
            text, future = self._waiting
            if text in self._recent and not future.done():
                with contextlib.suppress(asyncio.InvalidStateError):
                    future.set_result(time.monotonic())
