"""Traffic: what the server works on, for whom, how often, with what failures. Every request costs the same few steps.

Times are unix times, `now` included. Safe from any thread: screens read while requests come and go.
"""

from __future__ import annotations

import asyncio
import copy
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web

from console.api.http.errors import AS_SENT, MAX_MESSAGE_LENGTH, ErrorFormatter, envelope, error_response
from console.api.http.scopes import ADMIN, LOOKING
from console.link.api import ClientReading, Failure, FailureCount
from engine.errors import EngineError, ModelLoadFailed
from engine.text.printable import printable

LAST_FAILURES = 50
MAX_CLIENTS = 500
"""Clients that are told apart at once: those that asked last."""

LINGER_S = 60.0
"""How long a client that asks nothing more is still shown."""

MINUTE = 60
_LONGEST = 200
"""Characters of what clients say of themselves."""


@dataclass(slots=True)
class _Client:
    """under_way: requests now; last_at: when it last asked or was answered."""

    since: float
    under_way: int = 0
    requests: int = 0
    last_at: float = 0.0


class Ending(NamedTuple):
    """How a request failed."""

    status: int
    code: str
    message: str


@dataclass(slots=True)
class Call:
    """One request under way, and what it turns out to be. key: the name of its key, "" for none.

    client: None until it is known whose the request is.  failure: None where all went well.
    sent_bytes: of an answer that is streamed.
    format_error: makes the body of an error for the client.  request_id: what its answer goes by.
    prompt_field: what its body calls the prompt.
    began: whether an answer did; it cannot be another one any more.
    is_allowed: whether it still may be answered: keys are revoked while answers last.
    """

    address: str
    agent: str
    method: str
    path: str
    key: str = ""
    dialect: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    sent_bytes: int = 0
    failure: Ending | None = None
    format_error: ErrorFormatter = envelope
    request_id: str = ""
    prompt_field: str = "prompt"
    began: bool = False
    is_allowed: Callable[[], bool] = lambda: True
    client: _Client | None = None


class Rate:
    """How often something happened in each of the last 60 seconds."""

    def __init__(self) -> None:
        self._seconds = deque([0] * MINUTE, maxlen=MINUTE)
        self._at = 0

    def add(self, now: float) -> None:
        """Once, at `now`."""
        self._advance(now)
        self._seconds[-1] += 1

    def seconds(self, now: float) -> tuple[int, ...]:
        """Each second's count, oldest first; that of `now` last."""
        self._advance(now)
        return tuple(self._seconds)

    def _advance(self, now: float) -> None:
        for _ in range(min(MINUTE, max(0, int(now) - self._at))):
            self._seconds.append(0)
        self._at = max(self._at, int(now))


class Traffic:
    """Requests under way and so far. closing: the server stops, and takes no more work."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.total = 0
        self.closing = False
        self._now = now
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[str, str, str], _Client] = OrderedDict()
        self._dialects: Counter[str] = Counter()
        self._failures: deque[Failure] = deque(maxlen=LAST_FAILURES)
        self._failure_counts: Counter[tuple[int, str]] = Counter()
        self._requests_rate, self._failures_rate = Rate(), Rate()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until no request is under way, for `timeout_s` at most where that is given."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def enter(self, address: str, agent: str, method: str, path: str) -> Call:
        """A request begins."""
        call = Call(address, readable(agent), method, readable(path))
        with self._lock:
            self.total += 1
            self._under_way += 1
            self._requests_rate.add(self._now())
        self._idle.clear()
        return call

    def admit(self, call: Call, key: str) -> None:
        """It is known by now whose it is: `key` is the name of its key, "" where none is needed."""
        call.key = key
        with self._lock:
            call.client = client = self._client((call.address, key, call.agent))
            client.requests += 1
            client.under_way += 1
            client.last_at = self._now()

    def leave(self, call: Call) -> None:
        """A request has ended."""
        now = self._now()
        with self._lock:
            self._under_way -= 1
            if call.dialect:
                self._dialects[call.dialect] += 1
            if call.client is not None:
                call.client.under_way -= 1
                call.client.last_at = now
            if call.failure is not None:
                self._note_failure(call, call.failure, now)
        if not self._under_way:
            self._idle.set()

    # -- what there is to see ---------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Requests now."""
        return self._under_way

    def clients(self) -> tuple[ClientReading, ...]:
        """Who asks now or did just before, busiest first, then in the order of their coming."""
        oldest = self._now() - LINGER_S
        with self._lock:
            readings = [
                ClientReading(
                    address=address,
                    key=key,
                    agent=agent,
                    under_way=client.under_way,
                    requests=client.requests,
                    since=client.since,
                )
                for (address, key, agent), client in self._clients.items()
                if client.under_way or client.last_at >= oldest
            ]
        return tuple(sorted(readings, key=lambda reading: (-reading.under_way, reading.since)))

    def dialects(self) -> dict[str, int]:
        """Requests so far by the name of their dialect."""
        with self._lock:
            return dict(self._dialects)

    def failures(self) -> tuple[Failure, ...]:
        """The last ones, newest first."""
        with self._lock:
            return tuple(reversed(self._failures))

    def failure_counts(self) -> tuple[FailureCount, ...]:
        """By status and code, most first."""
        with self._lock:
            counted = self._failure_counts.most_common()
        return tuple(FailureCount(status=status, code=code, count=count) for (status, code), count in counted)

    def per_second(self) -> tuple[int, ...]:
        """Requests in each of the last 60 seconds, oldest first."""
        with self._lock:
            return self._requests_rate.seconds(self._now())

    def failures_per_min(self) -> int:
        """Failures in the last 60 seconds."""
        with self._lock:
            return sum(self._failures_rate.seconds(self._now()))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _client(self, who: tuple[str, str, str]) -> _Client:
        """The client, moved to the end; one that was long away begins anew, and the one at the front may have to go."""
        now = self._now()
        known = self._clients.get(who)
        if known is not None and (known.under_way or now - known.last_at <= LINGER_S):
            self._clients.move_to_end(who)
            return known
        self._clients.pop(who, None)
        if len(self._clients) >= MAX_CLIENTS:
            self._clients.popitem(last=False)
        client = self._clients[who] = _Client(since=now)
        return client

    def _note_failure(self, call: Call, failure: Ending, now: float) -> None:
        self._failures_rate.add(now)
        self._failure_counts[failure.status, failure.code] += 1
        self._failures.append(
            Failure(
                at=now,
                status=failure.status,
                code=failure.code,
                message=readable(failure.message),
                client=call.address,
                key=call.key,
                method=call.method,
                path=call.path,
            )
        )


def readable(said: str, most: int = _LONGEST) -> str:
    """What a client says, not too long; what a terminal would obey is a visible escape: it is shown to a person."""
    return printable(said[:most])


# What a request came to: the call that counts it, and the error that it ended in, wherever it is told.

_PATH = re.compile(r"(?<![\w:/])(?:~|/[^\s/'\"<>,;:()]+)(?:/[^\s/'\"<>,;:()]+)+")

_CALL = web.RequestKey("call", Call)

_LEFT = Ending(499, "client_left", "The client left before the answer was complete")


def call_of(request: web.Request) -> Call:
    """What counts the request."""
    return request[_CALL]


def find_call(request: web.Request) -> Call | None:
    """What counts the request, None where it was answered before that began."""
    return request.get(_CALL)


def attach_call(request: web.Request, call: Call) -> Call:
    """From now on `call` counts the request."""
    request[_CALL] = call
    return call


def error_reply(request: web.Request, error: EngineError) -> web.Response:
    """The answer to a request that failed, which is counted. The connection ends where the rest of a body would have to
    be read first, which its client may never send."""
    record_failure(request, error)
    call = call_of(request)
    response = error_response(public_error(request, error), call.format_error)
    if request.can_read_body and not request.content.is_eof():
        response.force_close()
    return response


def error_body(request: web.Request, error: EngineError) -> object:
    """The JSON of an error in the shape of the request's dialect."""
    return call_of(request).format_error(public_error(request, error))


def record_failure(request: web.Request, error: EngineError) -> None:
    """Count a failure, also of a stream that began well."""
    call_of(request).failure = Ending(error.http_status, error.code, error.message)


def record_client_closed(request: web.Request) -> None:
    """Count a client that left before its answer was complete; one that only watched may leave at any time."""
    call = call_of(request)
    if call.failure is None and request.method not in LOOKING:
        call.failure = _LEFT


def public_error(request: web.Request, error: EngineError) -> EngineError:
    """An error as its client is told: with the id of its request in the details, for shapes that have room for it, and
    without the paths of this machine, which are for operators to know; `param` is the field that was sent, whatever the
    engine calls it. It is text whatever it quotes of the request."""
    call = call_of(request)
    put = copy.copy(error)
    put.details = {**error.details, "request_id": call.request_id}
    if put.details.get("param") == "prompt" and AS_SENT not in put.details:
        put.details["param"] = call.prompt_field
    ours = error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, ModelLoadFailed)
    if ours and not call.path.startswith(ADMIN):
        put.message = _PATH.sub(lambda found: found[0].rpartition("/")[2], error.message)
    put.message = readable(put.message, MAX_MESSAGE_LENGTH)
    return put
