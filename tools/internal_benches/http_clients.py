"""HTTP clients with little overhead, which parse only what the server under test sends."""

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
class ClientMeasurements:
    """took_s: of each request.  late_s: of each token, from the worker to the client.  chunks: events with tokens."""

    took_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    chunks: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens received."""
        return len(self.late_s)


def completion(port: int, *, max_tokens: int, stream: bool) -> bytes:
    """A completion request as bytes."""
    fields = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    body = msgspec.json.encode(fields)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: ericllm-bench\r\n"
        f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_completions(
    port: int, clients: int, requests: int, *, max_tokens: int, stream: bool
) -> ClientMeasurements:
    """Send `requests` requests from keep-alive clients, each one after the other. Raises WorkerFailed where one is not
    answered."""
    payload = completion(port, max_tokens=max_tokens, stream=stream)
    measured, remaining = ClientMeasurements(), iter(range(requests))
    loop = asyncio.get_running_loop()

    async def client() -> None:
        def protocol() -> _Client:
            return _Client(payload, remaining, measured, loop.create_future())

        _, connected = await loop.create_connection(protocol, "127.0.0.1", port)
        await connected.done

    await asyncio.gather(*(client() for _ in range(clients)))
    return measured


class _Client(asyncio.Protocol):
    """One connection, which sends until `remaining` is empty. done: set after its last answer."""

    def __init__(
        self, payload: bytes, remaining: Iterator[int], measured: ClientMeasurements, done: asyncio.Future[None]
    ) -> None:
        self.done = done
        self._payload = payload
        self._remaining = remaining
        self._measured = measured
        self._buffer = bytearray()
        self._body: Callable[[], bool] | None = None
        self._length = 0
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """asyncio: read what is complete."""
        self._buffer += data
        try:
            if self._body is None:
                self._body = self._read_head()
            if self._body is not None and self._body():
                self._body = None
                self._measured.took_s.append(time.monotonic() - self._sent_s)
                self._send()
        except WorkerFailed as error:
            self._transport.abort()
            self.done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: an error before the last answer."""
        if not self.done.done():
            self.done.set_exception(WorkerFailed("the server closed a connection"))

    def _send(self) -> None:
        if next(self._remaining, None) is None:
            self.done.set_result(None)
            self._transport.close()
            return
        self._sent_s = time.monotonic()
        self._transport.write(self._payload)

    def _read_head(self) -> Callable[[], bool] | None:
        """Return the reader of the body, None while the head is incomplete."""
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
        self._record(bytes(self._buffer[: self._length]))
        del self._buffer[: self._length]
        return True

    def _read_chunks(self) -> bool:
        """Read the complete chunks; return whether the last one was among them."""
        buffer, at, ended = self._buffer, 0, False
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            length = int(buffer[at:line_end], 16)
            end = line_end + 2 + length + 2
            if len(buffer) < end:
                break
            self._record(bytes(buffer[line_end + 2 : end - 2]))
            at, ended = end, not length
        del buffer[:at]
        return ended

    def _record(self, body: bytes) -> None:
        now_ns = time.monotonic_ns()
        for text in _TEXT.findall(body):
            stamps = text.split()
            self._measured.chunks += bool(stamps)
            self._measured.late_s.extend(1e-9 * (now_ns - int(stamp)) for stamp in stamps)
