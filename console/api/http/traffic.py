"""Traffic: requests under way, clients, rates and failures. Every request costs the same few steps.

Times are unix times, `now` included. Thread-safe: screens read while requests start and end.
"""

from __future__ import annotations

import asyncio
import copy
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, NamedTuple

from aiohttp import web

from console.api.http.errors import AS_SENT, MAX_MESSAGE_LENGTH, ErrorFormatter, envelope, error_response
from console.api.http.scopes import ADMIN, ALL, READ_METHODS
from console.link.api import ApiStopping, ClientReading, Failure, FailureCount, Scope
from engine.errors import Draining, EngineClosed, EngineError, ModelLoadFailed
from engine.text.printable import printable

LAST_FAILURES = 50
MAX_CLIENTS = 500
"""Clients that are remembered at once: those that asked last."""

LINGER_S = 60.0
"""How long an inactive client is still shown."""

MINUTE = 60
_MAX_NAME_CHARS = 200
"""Of user agents and paths."""


@dataclass(slots=True)
class _Client:
    """under_way: requests now; last_at: of the last start or end of a request."""

    since: float
    under_way: int = 0
    requests: int = 0
    last_at: float = 0.0


class CallFailure(NamedTuple):
    """Failure of a request."""

    status: int
    code: str
    message: str


@dataclass(slots=True)
class Call:
    """One request under way, filled in as it is processed. key: the name of its key, "" for none.

    scopes: what it may do.

    client: None before authentication.  agent: its User-Agent.  failure: None on success.
    sent_bytes: of a streamed answer.
    format_error: makes the body of an error for the client.  request_id: X-Request-Id of the answer.
    prompt_field: name of the prompt in its body.  tool_headers: of its answer, as in `ToolUse`.
    arrived: when it came, by the loop's clock.  began: True once the answer's headers are sent.
    is_allowed: returns whether it still may be answered: keys can be revoked while answers last.
    end_stream: ends a stream that began before the answer with an error; None where none began.
    """

    address: str
    agent: str
    method: str
    path: str
    key: str = ""
    scopes: tuple[Scope, ...] = ALL
    dialect: str = ""
    operation: str = "text_completion"
    prompt_tokens: int = 0
    output_tokens: int = 0
    sent_bytes: int = 0
    failure: CallFailure | None = None
    format_error: ErrorFormatter = envelope
    request_id: str = ""
    prompt_field: str = "prompt"
    tool_headers: Mapping[str, str] = field(default_factory=dict)
    arrived: float = 0.0
    began: bool = False
    is_allowed: Callable[[], bool] = lambda: True
    end_stream: Callable[[EngineError], Awaitable[web.StreamResponse]] | None = None
    client: _Client | None = None

    @property
    def program(self) -> str:
        """The first product of its User-Agent: "curl/8.5.0"."""
        return self.agent.partition(" ")[0]


class Rate:
    """Events in each of the last 60 seconds."""

    def __init__(self) -> None:
        self._seconds = deque([0] * MINUTE, maxlen=MINUTE)
        self._at = 0

    def add(self, now: float) -> None:
        """Count an event at `now`."""
        self._advance(now)
        self._seconds[-1] += 1

    def seconds(self, now: float) -> tuple[int, ...]:
        """Return each second's count, oldest first; that of `now` last."""
        self._advance(now)
        return tuple(self._seconds)

    def _advance(self, now: float) -> None:
        for _ in range(min(MINUTE, max(0, int(now) - self._at))):
            self._seconds.append(0)
        self._at = max(self._at, int(now))


Closing = Literal["", "api", "program"]
"""Why a server accepts no more work: the API is switched off, or the program ends; "" while it does."""

REFUSED_WORK_CODES = frozenset({Draining.code, ApiStopping.code})
"""Codes of work that is refused as the operator wants no more of it for now."""


class Traffic:
    """Requests under way and so far. closing: set once the server stops and accepts no more work."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.total = 0
        self.closing: Closing = ""
        self._now = now
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._clients: OrderedDict[tuple[str, str, str], _Client] = OrderedDict()
        self._dialects: Counter[str] = Counter()
        self._failures: deque[Failure] = deque(maxlen=LAST_FAILURES)
        self._failure_counts: Counter[tuple[int, str]] = Counter()
        self._requests_rate, self._failures_rate, self._refusals_rate = Rate(), Rate(), Rate()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until no request is under way, max `timeout_s` seconds; None for no limit."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def enter(self, address: str, agent: str, method: str, path: str) -> Call:
        """Count a request that begins."""
        call = Call(address, readable(agent), method, readable(path))
        with self._lock:
            self.total += 1
            self._under_way += 1
            self._requests_rate.add(self._now())
        self._idle.clear()
        return call

    def admit(self, call: Call, key: str) -> None:
        """Count the request for its client, once that is known: `key` is the name of its key, "" for none."""
        call.key = key
        with self._lock:
            call.client = client = self._client((call.address, key, call.program))
            client.requests += 1
            client.under_way += 1
            client.last_at = self._now()

    def leave(self, call: Call) -> None:
        """Count a request that has ended."""
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

    def closing_error(self) -> EngineError:
        """Return why work is refused while the server closes."""
        if self.closing == "api":
            return ApiStopping("The API is being switched off, new requests are refused")
        return EngineClosed("The server is stopping")

    def cut_error(self) -> EngineError:
        """Return why an answer ends that the server closes over."""
        if self.closing == "api":
            return ApiStopping("The API was switched off before the answer was complete")
        return EngineClosed("The server stopped before the answer was complete")

    # -- readings ---------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Requests under way."""
        return self._under_way

    def clients(self) -> tuple[ClientReading, ...]:
        """Return clients that are or were just active, busiest first, then by their first request."""
        oldest = self._now() - LINGER_S
        with self._lock:
            readings = [
                ClientReading(
                    address=address,
                    key=key,
                    program=program,
                    under_way=client.under_way,
                    requests=client.requests,
                    since=client.since,
                )
                for (address, key, program), client in self._clients.items()
                if client.under_way or client.last_at >= oldest
            ]
        return tuple(sorted(readings, key=lambda reading: (-reading.under_way, reading.since)))

    def dialects(self) -> dict[str, int]:
        """Return the number of requests so far, by dialect."""
        with self._lock:
            return dict(self._dialects)

    def failures(self) -> tuple[Failure, ...]:
        """Return the last failures, newest first."""
        with self._lock:
            return tuple(reversed(self._failures))

    def failure_counts(self) -> tuple[FailureCount, ...]:
        """Return failures by status and code, most frequent first."""
        with self._lock:
            counted = self._failure_counts.most_common()
        return tuple(FailureCount(status=status, code=code, count=count) for (status, code), count in counted)

    def per_second(self) -> tuple[int, ...]:
        """Return requests in each of the last 60 seconds, oldest first."""
        with self._lock:
            return self._requests_rate.seconds(self._now())

    def failures_per_min(self) -> int:
        """Return failures in the last 60 seconds."""
        with self._lock:
            return sum(self._failures_rate.seconds(self._now()))

    def refused_per_min(self) -> int:
        """Return requests refused in the last 60 seconds as the engine drains, or as the API is switched off."""
        with self._lock:
            return sum(self._refusals_rate.seconds(self._now()))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _client(self, identity: tuple[str, str, str]) -> _Client:
        """Return the client, as the most recent one; a returning one starts at zero, and the oldest one may be
        dropped."""
        now = self._now()
        existing = self._clients.get(identity)
        if existing is not None and (existing.under_way or now - existing.last_at <= LINGER_S):
            self._clients.move_to_end(identity)
            return existing
        self._clients.pop(identity, None)
        if len(self._clients) >= MAX_CLIENTS:
            self._clients.popitem(last=False)
        client = self._clients[identity] = _Client(since=now)
        return client

    def _note_failure(self, call: Call, failure: CallFailure, now: float) -> None:
        self._failures_rate.add(now)
        if is_refused_work(call):
            self._refusals_rate.add(now)
        self._failure_counts[failure.status, failure.code] += 1
        self._failures.append(
            Failure(
                at=now,
                status=failure.status,
                code=failure.code,
                message=readable(failure.message),
                client=call.address,
                key=call.key,
                program=call.program,
                method=call.method,
                path=call.path,
            )
        )


def is_refused_work(call: Call) -> bool:
    """Return whether a request was refused as the operator wants no more work for now; probes are none."""
    return call.failure is not None and call.failure.code in REFUSED_WORK_CODES and call.method not in READ_METHODS


def readable(text: str, max_chars: int = _MAX_NAME_CHARS) -> str:
    """Return text of a client, truncated and with control characters escaped: it is shown in a terminal."""
    return printable(text[:max_chars])


# The Call of a request, and the error that it ended with, as counted, logged and sent.

_PATH = re.compile(r"(?<![\w:/])(?:~|/[^\s/'\"<>,;:()]+)(?:/[^\s/'\"<>,;:()]+)+")

CALL = web.RequestKey("call", Call)

_CLIENT_LEFT = CallFailure(499, "client_left", "The client left before the answer was complete")


def call_of(request: web.Request) -> Call:
    """Return the Call of the request."""
    return request[CALL]


def find_call(request: web.Request) -> Call | None:
    """Return the Call of the request, None where it was answered before there is one."""
    return request.get(CALL)


def error_reply(request: web.Request, error: EngineError) -> web.Response:
    """Count a failure and return its answer. The connection is closed if a body is unread, as the client may never send
    the rest."""
    record_failure(request, error)
    call = call_of(request)
    response = error_response(public_error(request, error), call.format_error)
    if request.can_read_body and not request.content.is_eof():
        response.force_close()
    return response


def error_body(request: web.Request, error: EngineError) -> object:
    """Return the JSON of an error in the format of the request's dialect."""
    return call_of(request).format_error(public_error(request, error))


def record_failure(request: web.Request, error: EngineError) -> None:
    """Count a failure, also of a stream under way."""
    call_of(request).failure = CallFailure(error.http_status, error.code, error.message)


def record_client_closed(request: web.Request) -> None:
    """Count a client that disconnected before its answer was complete, unless the request was read-only."""
    call = call_of(request)
    if call.failure is None and request.method not in READ_METHODS:
        call.failure = _CLIENT_LEFT


def public_error(request: web.Request, error: EngineError) -> EngineError:
    """Return an error as the client may see it: with the request's id in the details, without paths of this machine
    (except for operators), and with `param` as the field's name in the request. Quoted input is escaped."""
    call = call_of(request)
    public = copy.copy(error)
    public.details = {**error.details, "request_id": call.request_id}
    if public.details.get("param") == "prompt" and AS_SENT not in public.details:
        public.details["param"] = call.prompt_field
    ours = error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, ModelLoadFailed)
    if ours and not call.path.startswith(ADMIN):
        public.message = _PATH.sub(lambda found: found[0].rpartition("/")[2], error.message)
    public.message = readable(public.message, MAX_MESSAGE_LENGTH)
    return public
