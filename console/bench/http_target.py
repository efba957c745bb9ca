"""A server somewhere, in any of the dialects that a bench speaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from console.bench.dialects import DIALECTS, Dialect
from console.bench.dialects.base import UNREADABLE, first_model
from console.bench.result import Setting, TargetInfo
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item, Material, TokenIds, Words
from console.link.remote.http import connect_error_reason, read_start
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

_LINE_BYTES = 1 << 23
_ANSWER_BYTES = 1 << 20
"""Read of a list of models, a refusal, and an answer of one token."""

_SHOWN = 300
_GREETING_TOKENS = 4
_TIMEOUT_S = 15.0
_CLOSE_TIMEOUT_S = 1.0
"""What a server has to answer the end of a websocket."""


class HttpTarget:
    """Target: `async with`, then `send`. tokenizer: the model's, where it is at hand; prompts are then exact."""

    def __init__(
        self, url: str, *, dialect: str = "openai", model: str = "", key: str = "", tokenizer: Tokenizer | None = None
    ) -> None:
        """Raises InvalidRequest for a URL or a dialect that is none."""
        self._url = _base(url)
        self._dialect = _dialect(dialect)
        self._model = model
        self._named = bool(model)
        self._headers = self._dialect.headers(key)
        self._tokenizer = tokenizer
        self._plain = False
        self._answered = False
        self._reports_counts = False
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpTarget:
        """Open connections as they are needed, as many as there are requests."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            headers=self._headers,
            read_bufsize=_LINE_BYTES,
        )
        if not self._model and self._dialect.models_path:
            self._model = await self._first_model()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close them."""
        if self._http is not None:
            await self._http.close()

    @property
    def info(self) -> TargetInfo:
        """Target: as far as it is known by now."""
        by_rule = not self._plain and self._dialect.counted_by
        return TargetInfo(
            kind="http",
            model=self._model,
            url=self._url,
            dialect=self._dialect.name,
            forces_length=self._dialect.forces and not self._plain,
            counted_by="usage" if self._reports_counts else by_rule if by_rule in ("asked", "ids") else "chunks",
        )

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Target: unknown."""
        return {}

    @property
    def material(self) -> Material:
        """Target: ids where the dialect takes them and the vocabulary is known."""
        if self._tokenizer is not None and self._dialect.takes_ids:
            return TokenIds.of(self._tokenizer)
        return Words(self._tokenizer)

    @property
    def max_model_len(self) -> int | None:
        """Target: unknown, as servers have no common way to report it."""
        return None

    async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        """Target: leave the iterator to close the connection, which ends the request in every server."""
        try:
            async with aclosing(self._send(item)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetFailed(f"{self._url} cannot be reached: {connect_error_reason(error)}", param="url") from error
        except HttpProcessingError as error:
            raise TargetFailed(f"{self._endpoint} sent an endless line", param="dialect") from error
        except UNREADABLE as error:
            raise TargetFailed(f"{self._endpoint} sent an unreadable answer: {error}", param="dialect") from error

    async def greet(self) -> None:
        """Ask for one token, to find out whether it answers at all: one that takes its time may be loading a model.

        Raises TargetFailed, its param what is most likely wrong.
        """
        item = Item(number=0, prompt=self.material.prompt(_GREETING_TOKENS, random.Random(0)), output_tokens=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S), aclosing(self.send(item)) as answer:
                async for _ in answer:
                    pass

    async def _send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        over_socket = self._dialect.over == "socket"
        if not (over_socket or self._plain or self._answered):
            await self._probe_extras(item)
        body = self._dialect.body(item, self._model, plain=self._plain)
        read, has_tokens, last = self._dialect.reader(), False, not over_socket
        async with aclosing(self._events_over_socket(body) if over_socket else self._events_over_post(body)) as events:
            async for event in events:
                chunk = read(event)
                if chunk is not None:
                    has_tokens = has_tokens or chunk.tokens > 0
                    self._reports_counts = self._reports_counts or chunk.output_tokens is not None
                    yield chunk
                    if chunk.last:
                        last = True
                        break
        if not last:
            raise TargetFailed(f"{self._endpoint} closed the connection before the end of the answer", param="url")
        if has_tokens and self._dialect.counted_by == "asked" and not self._plain:
            yield Chunk(output_tokens=item.output_tokens)

    async def _events_over_post(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The events of an answer in lines."""
        assert self._http is not None
        async with self._http.post(self._endpoint, json=body) as answer:
            if answer.status != 200:
                raise await self._error_of(answer)
            self._answered = True
            async for line in answer.content:
                if payload := _payload(line):
                    yield payload

    async def _events_over_socket(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The events of an answer over a websocket of its own."""
        assert self._http is not None
        try:
            async with self._http.ws_connect(
                self._endpoint, max_msg_size=_LINE_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_TIMEOUT_S)
            ) as socket:
                await socket.send_json(body)
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data.encode()
        except aiohttp.WSServerHandshakeError as error:
            raise self._failure(error.status, error.message) from error

    async def _probe_extras(self, item: Item) -> None:
        """Find out whether the server knows the fields that not every one of its kind does."""
        assert self._http is not None
        short = msgspec.structs.replace(item, output_tokens=1)
        body = self._dialect.body(short, self._model, plain=False)
        async with self._http.post(self._endpoint, json=body) as answer:
            await read_start(answer, _ANSWER_BYTES)
            self._answered = answer.status == 200
            self._plain = answer.status in (400, 422)

    async def _first_model(self) -> str:
        """The first that the server lists; "" where it lists none."""
        assert self._http is not None
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            async with self._http.get(self._url + self._dialect.models_path, timeout=timeout) as answer:
                return first_model(await read_start(answer, _ANSWER_BYTES)) if answer.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
            return ""

    async def _error_of(self, answer: aiohttp.ClientResponse) -> TargetFailed:
        text = " ".join(_error_text(await read_start(answer, _ANSWER_BYTES)).split())[:_SHOWN] or answer.reason
        return self._failure(answer.status, text)

    def _failure(self, status: int, text: str | None) -> TargetFailed:
        wrong = {401: "key", 403: "key", 404: "model" if self._named else "dialect", 405: "dialect"}
        return TargetFailed(f"{self._endpoint} answered {status}: {text}", param=wrong.get(status, "url"))

    @property
    def _endpoint(self) -> str:
        return self._url + self._dialect.path


def _error_text(body: bytes) -> str:
    """The message of an error answer, which most servers put into JSON."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return body.decode(errors="replace")
    for name in ("error", "detail", "message", "msg"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return found if isinstance(found, str) else body.decode(errors="replace")


def _payload(line: bytes) -> bytes:
    """The JSON of a line of SSE or of JSON lines; empty for framing."""
    line = line.strip()
    if line.startswith(b"data:"):
        line = line[5:].strip()
    return line if line.startswith(b"{") else b""


def _base(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        found = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        found = None
    if not found:
        raise InvalidRequest(f"{url} is not a server URL, such as http://127.0.0.1:8000", param="url")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("a server URL has no key; use --key-file", param="url")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise InvalidRequest(f"unknown dialect {name}; available: {', '.join(DIALECTS)}", param="dialect")
    return DIALECTS[name]
