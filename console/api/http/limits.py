"""How often and how much one client may ask: what is beyond that is told when to come back."""

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
"""Addresses that are told apart at once: those that asked last."""

_BUSY_S = 1.0
"""When to try again where too many requests are under way: nobody knows when one ends."""


class RateLimited(EngineError):
    """Too much, too often or too many at once; details: limit, retry_after_s."""

    code = "rate_limited"
    http_status = 429


class TokenBucket:
    """So much a minute, all of it at once where none was taken for that long. Times are of one clock, in seconds."""

    def __init__(self, per_min: int) -> None:
        self._most = float(per_min)
        self._left = self._most
        self._at = 0.0

    def wait_s(self, now: float, wanted: float = 1.0) -> float:
        """How long until `wanted` could be taken; 0 where it can be now."""
        self._refill(now)
        return max(0.0, (wanted - self._left) * MINUTE_S / self._most)

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take it, also what is not there: that is owed."""
        self._refill(now)
        self._left -= amount

    def _refill(self, now: float) -> None:
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._most / MINUTE_S)
        self._at = now


class KeyLimiter:
    """What stands before the requests of one key."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._requests = TokenBucket(limits.requests_per_min) if limits.requests_per_min else None
        self._tokens = TokenBucket(limits.tokens_per_min) if limits.tokens_per_min else None
        self._under_way = 0

    @contextmanager
    def passed(self, name: str) -> Iterator[None]:
        """While a request is under way. Raises RateLimited where it is one too many."""
        now = self._clock()
        if self._limits.concurrent and self._under_way >= self._limits.concurrent:
            raise _refusal(f"The key {name} may have {self._limits.concurrent} requests under way at once", _BUSY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now, 0.0)):
            raise _refusal(f"The key {name} may use {self._limits.tokens_per_min} tokens a minute", wait_s)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(now):
                raise _refusal(f"The key {name} may ask {self._limits.requests_per_min} times a minute", wait_s)
            self._requests.take(now)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def used(self, tokens: int) -> None:
        """What a request came to."""
        if self._tokens is not None:
            self._tokens.take(self._clock(), tokens)


class AddressLimiter:
    """What stands before the requests of each address beyond this machine. per_min: 0 lets all pass.

    Programs on this machine are not told apart by their address, and a proxy here asks for many: they all pass.
    """

    def __init__(self, per_min: int, clock: Callable[[], float]) -> None:
        self._per_min = per_min
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def enter(self, address: str) -> None:
        """Count a request. Raises RateLimited where it is one too many."""
        if not self._per_min or is_local_address(address):
            return
        bucket, now = self._bucket(_owner(address)), self._clock()
        if wait_s := bucket.wait_s(now):
            raise _refusal(f"One address may ask {self._per_min} times a minute here", wait_s)
        bucket.take(now)

    def _bucket(self, owner: str) -> TokenBucket:
        bucket = self._buckets.pop(owner, None) or TokenBucket(self._per_min)
        self._buckets[owner] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket


def _owner(address: str) -> str:
    """Who has that address: of the newer kind one has 2^64 at the least."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address


def _refusal(sentence: str, wait_s: float) -> RateLimited:
    return RateLimited(f"{sentence}; try again in {max(1, round(wait_s))} s", retry_after_s=wait_s)


# Requests begin one at a time: however many came at once, the loop comes round, and who only asks after the server's
# health is answered then.

STARTS_PER_ROUND = 1
"""How many begin in one round of the loop: reading, checking and tokenising one takes some milliseconds."""


class RequestPacer:
    """Who may begin in this round of the loop; the others follow in the rounds to come, in the order they came in."""

    def __init__(self, at_once: int = STARTS_PER_ROUND) -> None:
        self._at_once = at_once
        self._begun = 0
        self._counts = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Come back in a round in which there is room; at once where that is this one."""
        loop = asyncio.get_running_loop()
        if not self._counts:
            self._counts = True
            loop.call_soon(self._next_round, loop)
        if self._begun < self._at_once and not self._waiting:
            self._begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client left meanwhile
                turn.set_result(None)
                self._begun += 1
        self._counts = self._begun > 0
        if self._counts:
            loop.call_soon(self._next_round, loop)


def pacing_middleware(turns: RequestPacer) -> Middleware:
    """Has every request wait for its turn but those that load balancers send, which must be answered in any weather."""

    @web.middleware
    async def take_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            await turns.take()
        return await handler(request)

    return take_turn
