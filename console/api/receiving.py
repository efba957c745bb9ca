"""Bodies are received before anybody is bothered with them: in time, not too long, and not nested too deep."""

from __future__ import annotations

import asyncio
from array import array
from itertools import accumulate

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.errors import BodyTooSlow
from console.api.failing import call_of
from console.api.scopes import LOOKING
from console.api.settings import ApiSettings
from engine.errors import InvalidRequest, RequestTimeout

_QUOTE = b'"'
_OTHERS = bytes(set(range(256)) - set(b"[]{}" + _QUOTE))
_STEPS = bytes.maketrans(b"[{]}", array("b", (1, 1, -1, -1)).tobytes())
"""How much deeper each bracket leads."""


def receiving(settings: ApiSettings) -> Middleware:
    """Reads the body of a request, which its handler then has at once. Where nobody would look at it, it is not read:
    of requests that only look, and of those for which there is no endpoint, whoever sends them."""

    @web.middleware
    async def receive(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body and request.method not in LOOKING and request.match_info.http_exception is None:
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
    """Raise InvalidRequest where JSON nests deeper than `most` levels; before anything is made of it.

    Everybody waits meanwhile, so it is a few passes over the bytes: escapes go, then all but quotes and brackets, and
    of what is left every second part between quotes lies outside of strings.
    """
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS).replace(_QUOTE * 2, b"")
    brackets = b"".join(marks.split(_QUOTE)[::2])
    if max(accumulate(array("b", brackets.translate(_STEPS))), default=0) > most:
        raise InvalidRequest(f"The body nests deeper than the {most} levels that are allowed")
