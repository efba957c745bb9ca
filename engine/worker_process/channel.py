"""The two ends of a worker's channel: a blocking one for the worker, an asyncio one for the engine.

The worker's commands are read by a thread of their own, so a step that takes long never holds up the sender, and the
end of the channel (the engine is gone) is seen even while a step runs. The engine's end reads whenever its loop runs,
which is why the worker may write without looking: it is held up only as long as the engine's loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from engine.worker_process.protocol import Codec, Command, Event, split_frames

_READ_BYTES = 1 << 20
_SOCKET_BUFFER_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of stream sockets with roomy buffers; neither is inherited by child processes."""
    pair = socket.socketpair()
    for end in pair:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return pair


class WorkerChannel:
    """The worker's end. `take` is for the loop's thread; `send` and `wake` may be called from any."""

    def __init__(self, sock: socket.socket, *, on_eof: Callable[[], None] | None = None) -> None:
        """on_eof: called on the reader's thread when the engine's end closed first, after `closed` turned true."""
        self._sock = sock
        self._on_eof = on_eof
        self._codec = Codec()
        self._sending = threading.Lock()
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._closed_here = False
        self._woken = False
        threading.Thread(target=self._read, name="worker-commands", daemon=True).start()

    @property
    def closed(self) -> bool:
        """True if either end is closed."""
        return self._closed

    def take(self, timeout_s: float = 0.0) -> Command | None:
        """Return the oldest command; with none, wait that long for one, or for `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed or self._woken, timeout_s)
            self._woken = False
            return self._commands.popleft() if self._commands else None

    def wake(self) -> None:
        """End the wait of `take`: there is something to do besides commands."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def has_waiting(self, *kinds: type[Command]) -> bool:
        """Return whether a command of one of these kinds waits to be taken."""
        with self._changed:
            return any(isinstance(command, kinds) for command in self._commands)

    def send(self, event: Event) -> None:
        """Write an event; does nothing once the channel is closed."""
        with self._sending:
            if self._closed:
                return
            try:
                self._sock.sendall(self._codec.frame(event))
            except OSError:
                self._end()

    def close(self) -> None:
        """Close this end: the engine sees the end of the channel after all that was sent."""
        self._closed_here = True
        self._end()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _read(self) -> None:
        buffer = bytearray()
        codec = Codec()
        try:
            while chunk := self._sock.recv(_READ_BYTES):
                buffer += chunk
                received = [codec.command(body) for body in split_frames(buffer)]
                with self._changed:
                    self._commands.extend(received)
                    self._changed.notify_all()
        except OSError:
            pass
        except msgspec.MsgspecError:
            _logger.exception("the engine sent an invalid command")
        self._end()
        if not self._closed_here and self._on_eof is not None:
            self._on_eof()


class EngineChannel(asyncio.Protocol):
    """The engine's end, on its asyncio loop: events to `on_event` (which must not raise) in order, then `on_closed`."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Event], None], on_closed: Callable[[], None]) -> None:
        self._sock = sock
        self._on_event = on_event
        self._on_closed = on_closed
        self._codec = Codec()
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls, sock: socket.socket, on_event: Callable[[Event], None], on_closed: Callable[[], None]
    ) -> EngineChannel:
        """Take over this end of a connection."""
        channel = cls(sock, on_event, on_closed)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return channel

    def send(self, command: Command) -> None:
        """Queue a command; never blocks, and does nothing once the channel is closed.

        What is sent in one turn of the loop arrives together: requests that come at once are in the same step.
        """
        if self._transport is None or self._transport.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(self._codec.frame(command))

    def _write(self) -> None:
        frames, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def abort(self) -> None:
        """Close at once, whatever is still on its way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is ours."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes were received; hand out the whole frames among them."""
        self._buffer += data
        for body in split_frames(self._buffer):
            try:
                event = self._codec.event(body)
            except msgspec.MsgspecError:
                _logger.exception("a worker sent an invalid event")
                self.abort()
                return
            self._on_event(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the other end closed, or we did."""
        if exc is not None:
            self._read_rest()
        self._on_closed()

    def _read_rest(self) -> None:
        """Read what a worker sent before it died while being written to: asyncio reads no further then."""
        with contextlib.suppress(OSError):  # nothing more to read
            while chunk := self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                self.data_received(chunk)
