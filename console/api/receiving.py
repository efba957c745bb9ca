"""Bodies are received before anybody is bothered with them: in time, not too long, and not nested too deep."""

from __future__ import annotations

import asyncio
import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.errors import BodyTooSlow
from console.api.failing import call_of
from console.api.settings import ApiSettings
from engine.errors import InvalidRequest, RequestTimeout

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def receiving(settings: ApiSettings) -> Middleware:
    """Reads the body of a request, which its handler then has at once."""

    @web.middleware
    async def receive(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body:
            check_depth(await _body(request, settings.body_timeout_s), settings.max_json_depth)
        return await handler(request)

    return receive


async def _body(request: web.Request, within_s: float) -> bytes:
    """The body; most are there with their heads, and need no time-out. Raises BodyTooSlow."""
    if request.content.is_eof():
        return await request.read()
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except TimeoutError:
        raise BodyTooSlow(f"The body did not come within {within_s:g} s", limit_s=within_s) from None


def ending(settings: ApiSettings) -> Middleware:
    """Ends what lasts longer than any request may: the engine ends answers in time, this who takes them too slowly."""

    @web.middleware
    async def end(request: web.Request, handler: Handler) -> web.StreamResponse:
        total_s = settings.total_timeout_s
        if total_s is None or not call_of(request).dialect:
            return await handler(request)
        try:
            async with asyncio.timeout(total_s) as limit:
                return await handler(request)
        except TimeoutError:
            if not limit.expired():
                raise
            if call_of(request).began and request.transport is not None:
                request.transport.abort()
            raise RequestTimeout(f"The request took longer than the {total_s:g} s that it may") from None

    return end


def check_depth(raw: bytes, most: int) -> None:
    """Raise InvalidRequest where JSON nests deeper than `most` levels; before anything is made of it."""
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    depth = 0
    for bracket in _STRING.sub(b"", raw).translate(None, _OTHERS):
        depth += 1 if bracket in b"[{" else -1
        if depth > most:
            raise InvalidRequest(f"The body nests deeper than the {most} levels that are allowed")
