"""HTTP clients that cost little themselves: they know of HTTP what the server under test says, and no more."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from engine.errors import WorkerFailed

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TEXT = re.compile(rb'"text":"([0-9 ]*)"')


@dataclass(slots=True)
class Seen:
    """What clients saw. took_s: of each request; late_s: of each token, from the worker to the client; chunks: events
    that held any."""

    took_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    chunks: int = 0

    @property
    def tokens(self) -> int:
        """How many came."""
        return len(self.late_s)


def completion(port: int, *, max_tokens: int, stream: bool) -> bytes:
    """A request for a completion, as bytes."""
    asked = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    body = msgspec.json.encode(asked)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: ericllm-bench\r\n"
        f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, clients: int, requests: int, *, max_tokens: int, stream: bool) -> Seen:
    """Have keep-alive clients, each asking again once it is answered, make so many requests in all. Raises WorkerFailed
    where one is not answered."""
    asked = completion(port, max_tokens=max_tokens, stream=stream)
    seen, left = Seen(), iter(range(requests))
    loop = asyncio.get_running_loop()

    async def client() -> None:
        def made() -> _Client:
            return _Client(asked, left, seen, loop.create_future())

        _, connected = await loop.create_connection(made, "127.0.0.1", port)
        await connected.over

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


class _Client(asyncio.Protocol):
    """One connection, which asks as long as `left` has something left. over: done when it has not."""

    def __init__(self, asked: bytes, left: Iterator[int], seen: Seen, over: asyncio.Future[None]) -> None:
        self.over = over
        self._asked = asked
        self._left = left
        self._seen = seen
        self._buffer = bytearray()
        self._body: Callable[[], bool] | None = None
        self._length = 0
        self._asked_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: ask."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        """asyncio: read as far as it goes."""
        self._buffer += data
        try:
            if self._body is None:
                self._body = self._read_head()
            if self._body is not None and self._body():
                self._body = None
                self._seen.took_s.append(time.monotonic() - self._asked_s)
                self._ask()
        except WorkerFailed as error:
            self._transport.abort()
            self.over.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is over, which it must not be before all is answered."""
        if not self.over.done():
            self.over.set_exception(WorkerFailed("the server closed a connection"))

    def _ask(self) -> None:
        if next(self._left, None) is None:
            self.over.set_result(None)
            self._transport.close()
            return
        self._asked_s = time.monotonic()
        self._transport.write(self._asked)

    def _read_head(self) -> Callable[[], bool] | None:
        """How the body is read, once the head is there."""
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return None
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + len(_HEAD_END)]
        if not head.startswith(b"HTTP/1.1 200"):
            status = head.partition(b"\r\n")[0].decode(errors="replace")
            raise WorkerFailed(f"the server answered {status}")
        length = _LENGTH.search(head)
        if length is None:
            return self._read_chunks
        self._length = int(length[1])
        return self._read_whole

    def _read_whole(self) -> bool:
        if len(self._buffer) < self._length:
            return False
        self._see(bytes(self._buffer[: self._length]))
        del self._buffer[: self._length]
        return True

    def _read_chunks(self) -> bool:
        """Every chunk that is there; whether the last one was."""
        buffer, at, over = self._buffer, 0, False
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            length = int(buffer[at:line_end], 16)
            end = line_end + 2 + length + 2
            if len(buffer) < end:
                break
            self._see(bytes(buffer[line_end + 2 : end - 2]))
            at, over = end, not length
        del buffer[:at]
        return over

    def _see(self, said: bytes) -> None:
        now_ns = time.monotonic_ns()
        for text in _TEXT.findall(said):
            stamps = text.split()
            self._seen.chunks += bool(stamps)
            self._seen.late_s.extend(1e-9 * (now_ns - int(stamp)) for stamp in stamps)
