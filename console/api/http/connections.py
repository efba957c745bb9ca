"""aiohttp's connections, with JSON errors for malformed HTTP too, fair reading, and a write timeout that disconnects
clients which stop reading."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import Handler

from console.api.http.errors import BadHttp, HeadersTooLarge, InternalError, error_response
from engine.errors import EngineError

log = logging.getLogger("api")

_MAX_LOG_CHARS = 200
"""Per log line, of which memory keeps thousands."""

FIRST_READ_BYTES = 2048
MIN_READ_BYTES = 256
MAX_READ_BYTES = 65_536
READ_S = 0.002
READERS = 8
"""Sizes of a read: first, minimum, maximum; and how long handling one should block the loop while up to READERS
connections are read per iteration of it. More share the same total, down to an eighth each."""

MAX_UNSENT_BYTES = 16_384
"""Bytes of an answer that the kernel takes before it can send them. By default these are megabytes, so that a whole
answer fits and a client that stops reading is not noticed. Bytes on their way do not count: transfers are as fast."""

REQUEST_ID = "X-Request-Id"
QUEUE_POSITION = "X-Queue-Position"
EXPECTED_WAIT = "X-Expected-Wait-Seconds"
QUEUE_WAIT = "X-Queue-Wait-Seconds"
UNLOADS = "X-Unloads"
TOOL_FORMAT = "X-Tool-Format"
"""The default format of calls, where tools are described in the prompt, as the chat template has none."""

NOT_STRICT = "X-Tools-Not-Strict"
"""Names of tools whose `strict` is not enforced."""

SERVER = "ericllm"
"""Server header of every answer: names neither the framework nor its version."""


class Runner(web.AppRunner):
    """Runs an application.

    write_timeout_s: disconnects clients that read nothing of an answer for this long.
    max_connections: beyond them, an idle connection is closed.  options: of aiohttp's connections.
    """

    def __init__(
        self, app: web.Application, *, write_timeout_s: float, max_connections: int = 2**16, **options: Any
    ) -> None:
        super().__init__(
            app,
            access_log=None,
            logger=_PeerLog(log),
            write_timeout_s=write_timeout_s,
            auto_decompress=False,  # aiohttp accepts truncated bodies; `request_body` decompresses them
            **options,
        )
        self._max_connections = max_connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _with_json_errors(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            max_connections=self._max_connections,
            **made._kwargs,
        )


class _Readers:
    """Counts connections read from, per iteration of the event loop. last: of the last iteration that read any."""

    def __init__(self) -> None:
        self.last = 1
        self._count = 0

    def add(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count one for this iteration."""
        if not self._count:
            loop.call_soon(self._end_iteration)
        self._count += 1

    def _end_iteration(self) -> None:
        self.last, self._count = self._count, 0


class _Server(web.Server):
    def __init__(self, *arguments: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.readers = _Readers()
        self._max_connections = max_connections

    def make_room(self, newest: _Connection) -> None:
        """Where there are too many connections, close the oldest idle one, or else the newest."""
        if len(self._connections) > self._max_connections:
            transports = cast(dict[_Connection, asyncio.Transport], self._connections)
            idle = (each for each, its in transports.items() if each.is_idle and not its.is_closing())
            next(idle, newest).force_close()

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """Watches all that is written (answers, streams, websockets): what the client does not read fills our memory."""

    __slots__ = ("_open_transport", "_reads", "_server", "_timer", "_unsent_bytes", "_write_timeout_s")

    def __init__(self, manager: _Server, *, write_timeout_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._server = manager
        self._write_timeout_s = write_timeout_s
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._open_transport: asyncio.Transport | None = (
            None  # aiohttp forgets one that it closes, which may still have bytes to send
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with small reads, keep few unsent bytes, and make room where there are too many connections."""
        super().connection_made(transport)
        _limit_unsent(cast(asyncio.Transport, transport))
        self._open_transport = cast(asyncio.Transport, transport)
        self._reads: Any = getattr(transport, "_ssl_protocol", transport)
        self._reads.max_size = FIRST_READ_BYTES
        self._server.make_room(self)

    def data_received(self, data: bytes) -> None:
        """Handle bytes, and adapt the size of the next read to the time that took: asyncio's 256 KiB, in chunks or
        frames of a byte, would block the loop for 100 ms."""
        began_s = time.perf_counter()
        super().data_received(data)
        took_s = time.perf_counter() - began_s
        if not data:  # aiohttp's own call, to go on with what it had buffered
            return
        self._server.readers.add(self._loop)
        limit_s = READ_S / min(max(self._server.readers.last / READERS, 1), 8)
        if took_s > limit_s:
            self._reads.max_size = max(MIN_READ_BYTES, self._reads.max_size // 4)
        elif took_s < limit_s / 4:
            self._reads.max_size = min(MAX_READ_BYTES, self._reads.max_size * 2)

    def pause_writing(self) -> None:
        """The write buffer is full: watch whether the client reads."""
        super().pause_writing()
        self._schedule_check()

    def resume_writing(self) -> None:
        """The write buffer has drained."""
        self._cancel_check()
        super().resume_writing()

    @property
    def is_idle(self) -> bool:
        """True if no request is under way."""
        return self._waiter is not None and not self._waiter.done()

    def close(self) -> None:
        """Close once no request is under way; aiohttp alone would leave an idle connection open that nothing
        answers."""
        is_idle = self._waiter is not None
        super().close()
        if is_idle and self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop watching."""
        self._cancel_check()
        self._open_transport = None
        super().connection_lost(exc)

    def _schedule_check(self) -> None:
        if self._open_transport is not None:
            self._unsent_bytes = self._open_transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._write_timeout_s, self._check_progress)

    def _cancel_check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self) -> None:
        """Disconnect a client that has read nothing since the last check; slow readers stay."""
        if self._open_transport is not None and self._open_transport.get_write_buffer_size() >= self._unsent_bytes:
            self._open_transport.abort()
        else:
            self._schedule_check()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP, and whatever failed outside the application."""
        super().handle_error(request, status, exc, message)
        request._version = HttpVersion11  # aiohttp assumes HTTP/1.0 for what it could not parse
        return _error_answer(
            _protocol_error(exc, message) if status < 500 else InternalError("The server failed to answer")
        )


def _limit_unsent(transport: asyncio.Transport) -> None:
    """Let writes wait as soon as the kernel takes no more, and let it take no more than MAX_UNSENT_BYTES ahead."""
    transport.set_write_buffer_limits(high=0)
    with suppress(OSError, AttributeError):  # a Unix socket has no such option, nor has every system
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def _with_json_errors(handle: Any) -> Any:
    """Wrap the application's handler: errors raised before any middleware runs get the same JSON."""
    inner: Handler = handle

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await inner(request)
        except EngineError as error:
            return _error_answer(error)
        except web.HTTPException as error:
            return _error_answer(BadHttp(error.reason))

    return answer


def _protocol_error(exc: BaseException | None, message: str | None) -> EngineError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge("A line of the request, its address or a header, is too long")
    return BadHttp(f"Malformed HTTP request: {(message or 'malformed').partition(chr(10))[0].rstrip(':')}")


def _error_answer(error: EngineError) -> web.Response:
    response = error_response(error)
    response.headers[REQUEST_ID] = secrets.token_hex(16)
    response.headers["Server"] = SERVER
    response.force_close()
    return response


class _PeerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. Its exceptions are malformed requests: the client's fault, so one line is enough."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **_: Any) -> None:
        """Log one line, and the traceback at debug level."""
        sentence = str(getattr(exc_info, "message", exc_info)).partition("\n")[0]  # without the excerpt after it
        self.warning("%s: %s", str(msg) % args, sentence[:_MAX_LOG_CHARS])
        self.debug("traceback", exc_info=exc_info)
