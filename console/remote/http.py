"""Instance: one engine's HTTP side, seen from elsewhere. Every failure is an EngineError with one sentence.

No redirection is followed: the key is for the address that was given.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from console.remote.address import Address
from console.remote.errors import NotAllowed, OutOfReach
from console.unreached import reason
from engine.errors import EngineError, ErrorInfo, from_info

CONNECT_S = 5.0
ANSWER_S = 30.0
SILENCE_S = 40.0
"""A stream says something every 15 seconds, were it only that it is there."""

_SSE = {"Accept": "text/event-stream"}
_LONGEST_LINE = 64 * 2**20
"""Bytes: the first event holds all that an engine knows."""


class Instance:
    """Use it with `async with`, on one loop. tls: whose certificates are trusted; None: the system's store says."""

    def __init__(self, address: Address, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        headers = {"User-Agent": "ericllm"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
            headers=headers,
            read_bufsize=2**20,
            max_line_size=2**16,
            trust_env=False,
            auto_decompress=True,
        )

    async def __aenter__(self) -> Instance:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The document at a path."""
        async with self._request("GET", path, params=query, timeout=_within(ANSWER_S)) as response:
            return await self._document(response)

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
            async for line in self._lines(response):
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                event = _decoded(data)
                if isinstance(event, dict) and "error" in event:
                    raise _told(event, 500)
                yield event

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Whole lines, however long."""
        held = bytearray()
        async for chunk in response.content.iter_any():
            held += chunk
            if len(held) > _LONGEST_LINE:
                raise OutOfReach(f"{self.address.name} sends events without an end", url=self.address.url)
            *lines, rest = bytes(held).split(b"\n") if b"\n" in chunk else [bytes(held)]
            for line in lines:
                yield line
            held = bytearray(rest)

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            url = f"{self.address.url}{path}"
            async with self._http.request(method, url, allow_redirects=False, **options) as response:
                if response.status >= 300:
                    raise _refusal(response.status, await response.read(), self.address)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise OutOfReach(f"{self.address.name} cannot be reached: {_reason(error)}", url=self.address.url) from None

    async def _document(self, response: aiohttp.ClientResponse) -> Any:
        return _decoded(await response.read())


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_S)


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise OutOfReach("What answers there is no ericllm: it sends no JSON") from None


def _refusal(status: int, body: bytes, address: Address) -> EngineError:
    """Why it was refused, as the instance says it."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("error"), dict):
        return OutOfReach(f"What answers at {address.name} is no ericllm (HTTP {status})", url=address.url)
    return _told(found, status)


def _told(document: Mapping[str, Any], status: int) -> EngineError:
    error = document["error"]
    message = str(error.get("message", "it did not say why"))
    if status in (401, 403):
        return NotAllowed(message, status=status)
    details = {} if error.get("param") is None else {"param": str(error["param"])}
    return from_info(ErrorInfo(code=str(error.get("code")), message=message, details=dict(details)))


def _reason(error: BaseException) -> str:
    untrusted = isinstance(error, aiohttp.ClientConnectorCertificateError)
    return f"{reason(error)}{'; --ca FILE names who is' if untrusted else ''}"
