"""Streams to a client: framing, keep-alive pings, and errors that come after the first byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import msgspec
from aiohttp import web

from console.api.http.errors import InternalError
from console.api.http.traffic import call_of, error_body, record_client_closed, record_failure
from console.api.settings import ApiSettings
from engine.errors import EngineError

log = logging.getLogger(__name__)

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of JSON documents as chunks. ping: keeps a silent stream open."""

    content_type: str
    frame: Callable[[bytes], bytes]
    ping: bytes | None = None


SSE = Framing("text/event-stream", lambda document: b"data: %b\n\n" % document, b": ping\n\n")


def named_event(document: bytes) -> bytes:
    """Return an event named by the type of its data, {"type":"message_start",...}."""
    return b"event: %b\ndata: %b\n\n" % (document.split(b'"', 4)[3], document)


NAMED_EVENTS = Framing("text/event-stream", named_event, b": ping\n\n")
JSON_LINES = Framing("application/x-ndjson", lambda document: b"%b\n" % document)


class ChunkStream:
    """An answer in chunks. Use it with `async with`, once nothing can be refused any more: entering sends the headers.

    An EngineError that leaves the block is sent as a last chunk, in the shape of the dialect's errors, and so is the
    news of any other exception: a stream that ends without its regular end is never taken for a whole answer.
    """

    def __init__(self, request: web.Request, settings: ApiSettings, framing: Framing = SSE) -> None:
        self._request = request
        self._call = call_of(request)
        self._settings = settings
        self._framing = framing
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._look: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.response.content_type = framing.content_type

    async def __aenter__(self) -> ChunkStream:
        await self.response.prepare(self._request)
        if self._framing.ping is not None:
            self._keep_open(self._framing.ping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._look is not None:
            self._look.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
        return await self._end(error)

    async def send(self, document: object) -> None:
        """Send one struct as a chunk; raises ConnectionError when the client has left or stopped reading."""
        await self.send_raw(msgspec.json.encode(document))

    async def send_raw(self, document: bytes) -> None:
        """Send bytes as one chunk."""
        chunk = self._framing.frame(document)
        self._wrote_at = self._loop.time()
        await self.response.write(chunk)
        if self._request.protocol.writing_paused:  # aiohttp itself looks after every 64 KiB
            await self._request.writer.drain()
        self._call.sent_bytes += len(chunk)

    def _keep_open(self, ping: bytes) -> None:
        """Ping after a long silence, unless the client has unread bytes. One timer serves the whole stream: a timer per
        chunk would cost as much as the chunk."""
        ping_s = self._settings.ping_s
        left_s = ping_s - (self._loop.time() - self._wrote_at)
        if left_s <= 0:
            left_s = ping_s
            if not self._request.protocol.writing_paused:
                self._wrote_at = self._loop.time()
                self._pinging = asyncio.create_task(self._ping(ping))
        self._look = self._loop.call_later(left_s, self._keep_open, ping)

    async def _ping(self, ping: bytes) -> None:
        with suppress(ConnectionError):
            await self.response.write(ping)

    async def _end(self, error: BaseException | None) -> bool:
        """Send what is left; return whether that handles the error."""
        if isinstance(error, ConnectionError):
            record_client_closed(self._request)
            return True
        if error is not None and not isinstance(error, Exception):
            return False
        with suppress(ConnectionError):
            if error is not None:
                shown = self._shown(error)
                record_failure(self._request, shown)
                await self.send(error_body(self._request, shown))
            await self.response.write_eof()
        return True

    def _shown(self, error: BaseException) -> EngineError:
        if isinstance(error, EngineError):
            return error
        log.error("%s %s failed while streaming", self._request.method, self._request.path, exc_info=error)
        return InternalError("Internal error while answering; the server log has the cause")
