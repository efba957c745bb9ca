"""Streams to a client: framing, keep-alive pings, and errors that come after the first byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import msgspec
from aiohttp import web

from console.api.http.errors import InternalError
from console.api.http.traffic import call_of, error_body, record_client_closed, record_failure
from console.api.requests.progress import Progress, follow, progress_of
from console.api.settings import ApiSettings
from engine.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"[DONE]"
SSE_TYPE = "text/event-stream"

COMMENT_S = 1.0
"""A stream that waits for its first token says at most so often where it stands."""


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of JSON documents as chunks. ping: keeps a silent stream open."""

    content_type: str
    frame: Callable[[bytes], bytes]
    ping: bytes | None = None

    @property
    def has_comments(self) -> bool:
        """True if clients skip lines that begin with a colon."""
        return self.content_type == SSE_TYPE


SSE = Framing(SSE_TYPE, lambda document: b"data: %b\n\n" % document, b": ping\n\n")


def named_event(document: bytes) -> bytes:
    """Return an event named by the type of its data, {"type":"message_start",...}."""
    return b"event: %b\ndata: %b\n\n" % (document.split(b'"', 4)[3], document)


NAMED_EVENTS = Framing(SSE_TYPE, named_event, b": ping\n\n")
JSON_LINES = Framing("application/x-ndjson", lambda document: b"%b\n" % document, b" ")
"""The ping is white space that the next line begins with; an empty line is no JSON to clients."""


_OPENED = web.RequestKey("opened_stream", web.StreamResponse)
"""The response of a request whose stream began before its answer."""


class ChunkStream:
    """An answer in chunks. Use it with `async with`, once nothing can be refused any more: entering sends the headers.

    An EngineError that leaves the block is sent as a last chunk, in the shape of the dialect's errors, and so is the
    news of any other exception: a stream that ends without its regular end is never taken for a whole answer.

    While the request waits or its prompt is computed, events are preceded by comments that say so (see `progress`).
    """

    def __init__(self, request: web.Request, settings: ApiSettings, framing: Framing = SSE) -> None:
        self._request = request
        self._call = call_of(request)
        self._settings = settings
        self._framing = framing
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._look: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._progress: Progress | None = None
        self._comment = ""
        self._comment_at = 0.0
        self.response = request.get(_OPENED) or web.StreamResponse(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        if not self.response.prepared:
            self.response.content_type = framing.content_type

    async def __aenter__(self) -> ChunkStream:
        await self._open(COMMENT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._pause()
        return await self._end(error)

    async def wait_for(self, work: asyncio.Future[T]) -> T:
        """Begin the stream, and comment on the request's progress until `work` is done; return its result. The stream
        of the answer goes on from there."""
        await self._open(0.0)
        self._request[_OPENED] = self.response
        self._call.end_stream = self._fail
        try:
            return await work
        finally:
            self._pause()

    async def _open(self, comment_s: float) -> None:
        """Send the headers; where they are sent, comments with those that came late. comment_s: until the first comment
        on the progress."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        elif self._framing.has_comments:
            for name, value in self._call.tool_headers.items():
                await self._write(f": {name}: {value}\n\n".encode())
        if self._framing.has_comments:
            self._progress, self._comment_at = progress_of(self._request), self._loop.time() + comment_s
        if self._framing.ping is not None:
            self._keep_open(self._framing.ping)

    def _pause(self) -> None:
        """Send no ping or comment any more."""
        if self._look is not None:
            self._look.cancel()
        if self._writing is not None:
            self._writing.cancel()

    async def _fail(self, error: EngineError) -> web.StreamResponse:
        await self._end(error)
        return self.response

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
        """Ping after a long silence, and comment on the progress, unless the client has unread bytes. One timer serves
        the whole stream: a timer per chunk would cost as much as the chunk."""
        now, ping_s = self._loop.time(), self._settings.ping_s
        due = self._due_comment(now)
        if not due and now - self._wrote_at >= ping_s:
            due = ping
        if due and not self._request.protocol.writing_paused:
            self._wrote_at = now
            self._writing = asyncio.create_task(self._write(due))
        left_s = self._wrote_at + ping_s - now if now - self._wrote_at < ping_s else ping_s
        if self._progress is not None:
            left_s = min(left_s, self._comment_at - now)
        self._look = self._loop.call_later(left_s, self._keep_open, ping)

    def _due_comment(self, now: float) -> bytes:
        """Return the progress where it is due and has changed, b"" otherwise. Nothing is due after the first token."""
        if self._progress is None or now < self._comment_at:
            return b""
        comment, before = self._progress.comment(), self._comment
        if comment is None:
            self._progress = None
            return b""
        self._comment, self._comment_at = comment, now + COMMENT_S
        return b": %b\n\n" % comment.encode() if comment != before else b""

    async def _write(self, frame: bytes) -> None:
        with suppress(ConnectionError):
            await self.response.write(frame)

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


async def wait_in_stream(
    request: web.Request,
    settings: ApiSettings,
    framing: Framing,
    progress: Progress,
    work: Awaitable[T],
) -> T:
    """Return the result of `work`. Where that takes longer than a second, the request's stream begins, with comments on
    the progress where it has any; an error is then its last document. Raises what `work` does."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    try:
        if (await asyncio.wait((task,), timeout=COMMENT_S))[0]:
            return await task
        follow(request, progress)
        return await ChunkStream(request, settings, framing).wait_for(task)
    finally:
        task.cancel()
