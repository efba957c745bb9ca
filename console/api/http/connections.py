"""Connections as aiohttp serves them, but what it says itself of bytes that are no HTTP is JSON as all errors here, and
who reads nothing of an answer is cut off."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import Handler

from console.api.http.errors import BadHttp, HeadersTooLarge, InternalError, error_response
from engine.errors import EngineError

log = logging.getLogger("api")

_LONGEST = 200
"""Characters of a line in the log, of which memory keeps thousands."""

FIRST_READ_BYTES = 2048
MIN_READ_BYTES = 256
MAX_READ_BYTES = 65_536
READ_S = 0.002
READERS = 8
"""What is taken of a connection at once: at first, at least and at most; and how long that should hold the loop, where
it reads of no more connections in a round. More share the time of so many, down to an eighth of it each."""

REQUEST_ID = "X-Request-Id"
SERVER = "ericllm"
"""What every answer says that it comes from: not what that is made with, in which version."""


class Runner(web.AppRunner):
    """Runs an application. write_timeout_s: who takes nothing of an answer for so long is cut off.

    max_connections: where there are more, one without a request is closed.  options: what aiohttp's connections take.
    """

    def __init__(
        self, app: web.Application, *, write_timeout_s: float, max_connections: int = 2**16, **options: Any
    ) -> None:
        super().__init__(
            app,
            access_log=None,
            logger=_PeerLog(log),
            write_timeout_s=write_timeout_s,
            auto_decompress=False,  # aiohttp takes a body that is cut short for a whole one; `receiving` unpacks them
            **options,
        )
        self._max_connections = max_connections

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _answering(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            max_connections=self._max_connections,
            **made._kwargs,
        )


class _Readers:
    """How many connections were read from in the last round of the loop that read from any."""

    def __init__(self) -> None:
        self.last = 1
        self._now = 0

    def add(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count one for this round."""
        if not self._now:
            loop.call_soon(self._end_round)
        self._now += 1

    def _end_round(self) -> None:
        self.last, self._now = self._now, 0


class _Server(web.Server):
    def __init__(self, *arguments: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.readers = _Readers()
        self._max_connections = max_connections

    def make_room(self, newest: _Connection) -> None:
        """End the connection that is the oldest of those without a request, or else the newest, where there are too
        many."""
        if len(self._connections) > self._max_connections:
            made = cast(dict[_Connection, asyncio.Transport], self._connections)
            idle = (each for each, its in made.items() if each.is_idle and not its.is_closing())
            next(idle, newest).force_close()

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """Looks after all that is written, whole answers, streams and websockets: what nobody takes is memory of ours."""

    __slots__ = ("_made", "_reads", "_server", "_untaken", "_watch", "_write_timeout_s")

    def __init__(self, manager: _Server, *, write_timeout_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._server = manager
        self._write_timeout_s = write_timeout_s
        self._untaken = 0
        self._watch: asyncio.TimerHandle | None = None
        self._made: asyncio.Transport | None = None  # aiohttp forgets one that it closes, which may have bytes left

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        super().connection_made(transport)
        self._made = cast(asyncio.Transport, transport)
        self._reads: Any = getattr(transport, "_ssl_protocol", transport)
        self._reads.max_size = FIRST_READ_BYTES
        self._server.make_room(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have come. The next time as many more or fewer are taken as fits what these took: asyncio's 256 KiB,
        in chunks or frames of a byte, would hold the loop for 100 ms."""
        began_s = time.perf_counter()
        super().data_received(data)
        took_s = time.perf_counter() - began_s
        if not data:  # aiohttp's own, where it goes on with what it had put aside
            return
        self._server.readers.add(self._loop)
        limit_s = READ_S / min(max(self._server.readers.last / READERS, 1), 8)
        if took_s > limit_s:
            self._reads.max_size = max(MIN_READ_BYTES, self._reads.max_size // 4)
        elif took_s < limit_s / 4:
            self._reads.max_size = min(MAX_READ_BYTES, self._reads.max_size * 2)

    def pause_writing(self) -> None:
        """More waits to be taken than should."""
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        """Most of it was taken."""
        self._look_no_more()
        super().resume_writing()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self._waiter is not None and not self._waiter.done()

    def close(self) -> None:
        """End it once nothing is under way; aiohttp alone would leave an idle one open, with nobody to answer it."""
        is_idle = self._waiter is not None
        super().close()
        if is_idle and self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is over."""
        self._look_no_more()
        self._made = None
        super().connection_lost(exc)

    def _look_later(self) -> None:
        if self._made is not None:
            self._untaken = self._made.get_write_buffer_size()
            self._watch = self._loop.call_later(self._write_timeout_s, self._look)

    def _look_no_more(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        """Cut off who has taken nothing since the last look; who takes little may go on."""
        if self._made is not None and self._made.get_write_buffer_size() >= self._untaken:
            self._made.abort()
        else:
            self._look_later()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP that we understand, and whatever broke outside the application."""
        super().handle_error(request, status, exc, message)
        request._version = HttpVersion11  # aiohttp takes what it could not read for HTTP/1.0
        return _told(_foreseen(exc, message) if status < 500 else InternalError("The server failed to answer"))


def _answering(handle: Any) -> Any:
    """The application's handler; what it refuses before any middleware sees it is told in the same shape."""
    inner: Handler = handle

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await inner(request)
        except EngineError as error:
            return _told(error)
        except web.HTTPException as error:
            return _told(BadHttp(error.reason))

    return answer


def _foreseen(exc: BaseException | None, message: str | None) -> EngineError:
    if isinstance(exc, LineTooLong):
        return HeadersTooLarge("A line of the request, its address or a header, is longer than is allowed")
    return BadHttp(
        f"That is no HTTP that is understood here: {(message or 'malformed').partition(chr(10))[0].rstrip(':')}"
    )


def _told(error: EngineError) -> web.Response:
    response = error_response(error)
    response.headers[REQUEST_ID] = secrets.token_hex(16)
    response.headers["Server"] = SERVER
    response.force_close()
    return response


class _PeerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. What it calls exceptions are bytes that are no HTTP: the client's fault, so one line is enough."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **_: Any) -> None:
        """One line; the traceback where debugging was asked for."""
        said = str(getattr(exc_info, "message", exc_info))  # a parser's own sentence, then what it pointed at
        self.warning("%s: %s", str(msg) % args, said.partition("\n")[0][:_LONGEST])
        self.debug("its traceback", exc_info=exc_info)
