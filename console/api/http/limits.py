"""Rate limits: requests and tokens of one client; a refusal says when to try again."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.http.client_address import is_local_address
from console.api.http.scopes import OPEN_PATHS
from console.link.api import KeyLimits
from engine.errors import EngineError

MINUTE_S = 60.0
MAX_ADDRESSES = 4096
"""Addresses that are counted at once: those that asked last."""

_BUSY_S = 1.0
"""When to try again where too many requests are under way: when one ends is unknown."""


class RateLimited(EngineError):
    """Too many requests or tokens; details: limit, retry_after_s."""

    code = "rate_limited"
    http_status = 429


class TokenBucket:
    """Refills `per_min` a minute, up to that capacity. Times are of one clock, in seconds."""

    def __init__(self, per_min: int) -> None:
        self._capacity = float(per_min)
        self._available = self._capacity
        self._refilled_at = 0.0

    def wait_s(self, now: float, wanted: float = 1.0) -> float:
        """Return how long until `wanted` is available; 0 if it is now."""
        self._refill(now)
        return max(0.0, (wanted - self._available) * MINUTE_S / self._capacity)

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take an amount; what is not available becomes debt."""
        self._refill(now)
        self._available -= amount

    def _refill(self, now: float) -> None:
        self._available = min(
            self._capacity, self._available + max(0.0, now - self._refilled_at) * self._capacity / MINUTE_S
        )
        self._refilled_at = now


class KeyLimiter:
    """Enforces the limits of one key."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._requests = TokenBucket(limits.requests_per_min) if limits.requests_per_min else None
        self._tokens = TokenBucket(limits.tokens_per_min) if limits.tokens_per_min else None
        self._under_way = 0

    @contextmanager
    def admit(self, name: str) -> Iterator[None]:
        """Admit a request, for as long as it is under way. Raises RateLimited beyond a limit."""
        now = self._clock()
        if self._limits.concurrent and self._under_way >= self._limits.concurrent:
            raise _too_many(f"Limit of key {name}: {self._limits.concurrent} concurrent requests", _BUSY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now, 0.0)):
            raise _too_many(f"Limit of key {name}: {self._limits.tokens_per_min} tokens per minute", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(now):
                raise _too_many(f"Limit of key {name}: {self._limits.requests_per_min} requests per minute", wait_s)
            self._requests.take(now)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def record_tokens(self, tokens: int) -> None:
        """Count the tokens of a finished request."""
        if self._tokens is not None:
            self._tokens.take(self._clock(), tokens)


class AddressLimiter:
    """Limits requests per address. per_min: 0 for no limit.

    This machine's addresses have no limit: its programs share them, and a local proxy serves many clients.
    """

    def __init__(self, per_min: int, clock: Callable[[], float]) -> None:
        self._per_min = per_min
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def count(self, address: str) -> None:
        """Count a request. Raises RateLimited beyond the limit."""
        if not self._per_min or is_local_address(address):
            return
        bucket, now = self._bucket(_address_group(address)), self._clock()
        if wait_s := bucket.wait_s(now):
            raise _too_many(f"Limit per address: {self._per_min} requests per minute", wait_s)
        bucket.take(now)

    def _bucket(self, owner: str) -> TokenBucket:
        bucket = self._buckets.pop(owner, None) or TokenBucket(self._per_min)
        self._buckets[owner] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket


def _address_group(address: str) -> str:
    """Return the address to count by: of IPv6 the /64 network, which one client has at least."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address


def _too_many(sentence: str, wait_s: float) -> RateLimited:
    return RateLimited(f"{sentence}; try again in {max(1, round(wait_s))} s", retry_after_s=wait_s)


# Requests start one per iteration of the event loop, so that health checks are answered however many arrive at once.

STARTS_PER_ROUND = 1
"""Requests started per iteration of the loop: reading, checking and tokenising one takes some milliseconds."""


class RequestPacer:
    """Admits some requests per iteration of the loop; the others follow in the order of arrival."""

    def __init__(self, per_round: int = STARTS_PER_ROUND) -> None:
        self._per_round = per_round
        self._started = 0
        self._counting = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for an iteration with room; return at once if this one has."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_round, loop)
        if self._started < self._per_round and not self._waiting:
            self._started += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started = 0
        while self._waiting and self._started < self._per_round:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its client has disconnected
                waiter.set_result(None)
                self._started += 1
        self._counting = self._started > 0
        if self._counting:
            loop.call_soon(self._next_round, loop)


def pacing_middleware(pacer: RequestPacer) -> Middleware:
    """Pace all requests except health checks of load balancers, which must always be answered."""

    @web.middleware
    async def pace(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            await pacer.take()
        return await handler(request)

    return pace
