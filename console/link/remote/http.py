"""Instance: one engine's HTTP side, seen from elsewhere. Every failure is an EngineError with one sentence.

What answers there may mean harm: nothing of it is read without a bound, unpacked, or kept (cookies). No redirection is
followed: the key is for the address that was given.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from console.link.bounded_decode import decode_json
from engine.config import quote_value
from engine.errors import EngineError, ErrorInfo, InvalidRequest, from_info

# Why a server could not be reached, in few words.


def connect_error_reason(error: BaseException) -> str:
    """Of an error of aiohttp's client, or of a socket."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted: {why}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "unknown host"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused" if isinstance(error.os_error, ConnectionRefusedError) else str(error.os_error)
    if isinstance(error, aiohttp.InvalidURL):
        return "not a URL"
    return "connection lost"


# Where an instance is. Pure.

DEFAULT_URL = "http://127.0.0.1:8000"


class Address(msgspec.Struct, frozen=True):
    """url: without a slash at its end.  name: "host:port", as a person knows it."""

    url: str
    name: str


def address_of(text: str) -> Address:
    """Of "host", "host:port" or a URL; raises InvalidRequest with one sentence."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{text} is not the URL of an instance: {error}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{text} is not the URL of an instance, such as {DEFAULT_URL}", param="url")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest(f"{text} is more than the URL of an instance; set the key with --api-key", param="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None:
        port = 443 if parts.scheme == "https" else 80 if "://" in text else 8000
    path = parts.path.rstrip("/")
    return Address(f"{parts.scheme}://{host}:{port}{path}", f"{host}:{port}{path}")


# What only a console on a distant engine can run into.


class OutOfReach(EngineError):
    """The instance does not answer; details: url."""

    code = "out_of_reach"
    http_status = 503


class NotAllowed(EngineError):
    """The instance wants a key, or the key may not do that; details: status."""

    code = "not_allowed"
    http_status = 403


CONNECT_S = 5.0
ANSWER_S = 30.0
SILENCE_S = 40.0
"""A stream says something every 15 seconds, were it only that it is there."""

MAX_BYTES = 16 * 2**20
"""Of an answer, and of a stream from one event to the next. The first event holds all that an engine knows: 2 MiB with
5,000 requests."""

MAX_REFUSAL_BYTES = 64 * 2**10
"""Of an answer that says why there is none."""

_MAX_MESSAGE = 800
_DATA = re.compile(rb"^data:(.*)$", re.MULTILINE)
_SSE = {"Accept": "text/event-stream"}


class Instance:
    """Use it with `async with`, on one loop. tls: whose certificates are trusted; None: the system's store says."""

    def __init__(self, address: Address, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        headers = {"User-Agent": "ericllm", "Accept-Encoding": "identity"} | (
            {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        )
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
            headers=headers,
            read_bufsize=2**20,
            max_line_size=2**16,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Instance:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The document at a path."""
        async with self._request("GET", path, params=query, timeout=_within(ANSWER_S)) as response:
            return self._decode(await self._body(response))

    async def events(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        silence_s: float = SILENCE_S,
    ) -> AsyncGenerator[Any, None]:
        """The events of a stream: a GET, or a POST where there is a body. "[DONE]" is no event.

        silence_s: how long it may say nothing before it is taken for dead. Raises what an event says went wrong.
        """
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        async with self._request(method, path, params=query, json=body, headers=_SSE, timeout=timeout) as response:
            async for data in self._data(response):
                if data == b"[DONE]":
                    continue
                event = self._decode(data)
                if isinstance(event, dict) and "error" in event:
                    raise _error_of(event["error"], 500)
                yield event
                await asyncio.sleep(0)  # as many may have come at once

    async def _data(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the data of each event."""
        buffer = bytearray()
        since = 0  # bytes since the last event
        async for chunk in response.content.iter_any():
            buffer += chunk
            since += len(chunk)
            if since > MAX_BYTES:
                raise self._too_much("before an event ends")
            if b"\n" not in chunk:
                continue
            end = buffer.rindex(b"\n") + 1
            lines = bytes(buffer[:end])
            del buffer[:end]
            for line in _DATA.finditer(lines):
                since = 0
                yield line[1].strip()

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = await read_start(response, MAX_BYTES)
        if len(body) > MAX_BYTES:
            raise self._too_much("in one answer")
        return body

    def _too_much(self, where: str) -> OutOfReach:
        return OutOfReach(
            f"{self.address.name} sends more than {MAX_BYTES // 2**20} MiB {where}",
            url=self.address.url,
            max_bytes=MAX_BYTES,
        )

    def _decode(self, data: bytes) -> Any:
        try:
            return decode_json(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise OutOfReach("Not an answer of EricLLM: invalid JSON") from None
        except ValueError as error:
            raise OutOfReach(f"Invalid data from {self.address.name}: {error}", url=self.address.url) from None

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            url = f"{self.address.url}{path}"
            async with self._http.request(method, url, allow_redirects=False, **options) as response:
                if response.status >= 300:
                    raise _refusal(response.status, await read_start(response, MAX_REFUSAL_BYTES), self.address)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise OutOfReach(f"{self.address.name} cannot be reached: {_reason(error)}", url=self.address.url) from None


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)


async def read_start(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    """The body; of one that is longer than `num_bytes`, somewhat more than these."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > num_bytes:
            break
    return bytes(body)


def _refusal(status: int, body: bytes, address: Address) -> EngineError:
    """Why it was refused, as the instance says it."""
    try:
        error = decode_json(body)["error"]
        error["message"]
    except (ValueError, TypeError, KeyError):
        return OutOfReach(f"The server at {address.name} is not EricLLM (HTTP {status})", url=address.url)
    return _error_of(error, status)


def _error_of(error: object, status: int) -> EngineError:
    """Return the error of an instance, in its words."""
    found = error if isinstance(error, dict) else {}
    message = quote_value(found.get("message", "no cause given"), _MAX_MESSAGE)
    if status in (401, 403):
        return NotAllowed(message, status=status)
    details = {} if found.get("param") is None else {"param": quote_value(found["param"])}
    return from_info(ErrorInfo(code=str(found.get("code")), message=message, details=dict(details)))


def _reason(error: BaseException) -> str:
    untrusted = isinstance(error, aiohttp.ClientConnectorCertificateError)
    return f"{connect_error_reason(error)}{'; trust it with --ca FILE' if untrusted else ''}"
