"""Observability: reports every finished HTTP request to the access log, traces and metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.http.traffic import Call, call_of
from console.runtime.line_writer import LineWriter
from engine.config import SamplingParams
from engine.errors import EngineError
from engine.metrics.distributions import HistogramCounter
from engine.models.files import home_expanded
from engine.requests.history import WorkerSpan
from engine.snapshot import RequestRow
from engine.text.printable import printable_json

CLIENT_CLOSED_STATUS = 499
"""Status of a request whose client disconnected before the answer, as in nginx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """The engine's work for one answer. id, model: those of the answer.

    choices: answers requested per prompt.  rows: one per request of the engine, all ended.
    stays: spans on workers, per row.
    """

    id: str
    model: str
    params: SamplingParams
    choices: int
    rows: tuple[RequestRow, ...]
    stays: tuple[tuple[WorkerSpan, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """Outcome of a request. at: unix time of its arrival.  total_s: until it was answered, or disconnected.

    status: of the answer, CLIENT_CLOSED_STATUS without one.  body_bytes: of the answer, None if unknown.
    """

    at: float
    total_s: float
    status: int
    body_bytes: int | None
    works: tuple[EngineWork, ...]


class RequestObserver(Protocol):
    """Records finished requests."""

    def on_request(self, request: web.Request, call: Call, outcome: RequestOutcome) -> None:
        """Record a finished request. Called on the engine's loop, so slow work is done elsewhere."""


_WORKS = web.RequestKey("works", list[EngineWork])


def add_work(request: web.Request, work: EngineWork) -> None:
    """Add the engine's work to the request."""
    request[_WORKS] = [*request.get(_WORKS, ()), work]


def observability_middleware(observers: Iterable[RequestObserver]) -> Middleware:
    """Report every request to the observers, however it ends. The outermost middleware."""

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        at, began = time.time(), time.monotonic()
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
            return response
        finally:
            call = call_of(request)
            outcome = RequestOutcome(
                at=at,
                total_s=time.monotonic() - began,
                status=CLIENT_CLOSED_STATUS if response is None else response.status,
                body_bytes=_body_bytes(response, call),
                works=tuple(request.get(_WORKS, ())),
            )
            for observer in observers:
                observer.on_request(request, call, outcome)

    return observe


def route_of(request: web.Request) -> str:
    """Return the route of a request, such as `/v1/models/{model}`; "" for none."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _body_bytes(response: web.StreamResponse | None, call: Call) -> int | None:
    """Return the size of the answer's body; of a stream, of what was sent."""
    if isinstance(response, web.Response):
        body = response.body
        return len(body) if isinstance(body, bytes | bytearray) else 0 if body is None else None
    return None if isinstance(response, web.WebSocketResponse) else call.sent_bytes


# HTTP requests by route, method and kind of status, under the names that vLLM's server has them.

DURATION_BOUNDS_S = (0.1, 0.5, 1.0)
_UNCOUNTED = frozenset({"/metrics", "/health", "/ready"})
"""Requests of monitoring itself: a probe's 503 while a model loads is not a failed request."""


class HttpMetrics(Collector):
    """Counts requests for Prometheus. Belongs to the engine's loop, as its registry does."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[tuple[str, str], HistogramCounter] = {}

    def on_request(self, request: web.Request, call: Call, outcome: RequestOutcome) -> None:
        """Count a request by route, method and status."""
        route = route_of(request) or "none"
        if route in _UNCOUNTED:
            return
        method = request.method if request.method in _METHODS else "other"
        self._requests[route, method, f"{outcome.status // 100}xx"] += 1
        took = self._durations.setdefault((route, method), HistogramCounter(DURATION_BOUNDS_S))
        took.observe(outcome.total_s)

    def collect(self) -> Iterator[Metric]:
        """Return the counts now."""
        requests = CounterMetricFamily("http_requests", "HTTP requests", labels=["handler", "method", "status"])
        for labels, count in sorted(self._requests.items()):
            requests.add_metric(labels, count)
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "HTTP request duration", labels=["handler", "method"]
        )
        for key, counter in sorted(self._durations.items()):
            histogram = counter.freeze()
            buckets = [
                *zip(map(repr, histogram.bounds), map(float, histogram.counts), strict=True),
                ("+Inf", float(histogram.count)),
            ]
            durations.add_metric(key, buckets, histogram.sum)
        yield from (requests, durations)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""All others are one: clients may make up any."""


# The access log: one line of JSON per HTTP request, with token counts and times, never with prompts or answers.

STDOUT = "-"


class CannotLog(EngineError):
    """The access log cannot be written."""

    code = "cannot_log"
    http_status = 500


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times in seconds; None if it does not apply or is unknown.

    time: of its arrival (UTC).  id: X-Request-Id of the answer.  client: address.  key: name of its key.
    answers: ids of the answers, as in the console's request table and logs.
    queue_s: until a worker started the last of its requests.  ttft_s: from its arrival to the first token.
    status: 499 where the client disconnected.  bytes: of the answer's body.  error: code of the error.
    """

    time: str
    id: str
    client: str
    key: str | None
    agent: str
    method: str
    path: str
    dialect: str | None
    model: str | None
    answers: list[str]
    status: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float
    finish_reasons: list[str]
    bytes: int | None
    error: str | None


class AccessLog:
    """Writes the access log. target: a file, or STDOUT, which is free only without a screen."""

    def __init__(self, target: str, *, owns_stdout: bool, max_bytes: int) -> None:
        if target == STDOUT and not owns_stdout:
            raise CannotLog("--access-log - needs --headless; give a file")
        self._path = None if target == STDOUT else home_expanded(target)
        self._lines = LineWriter(self._path, _encode, max_bytes=max_bytes)

    @property
    def lost(self) -> int:
        """Lines that could not be written."""
        return self._lines.lost

    def open(self) -> None:
        """Open the log. Raises CannotLog."""
        try:
            self._lines.open()
        except OSError as error:
            raise CannotLog(f"The access log {self._path} cannot be written: {error.strerror or error}") from error

    def on_request(self, request: web.Request, call: Call, outcome: RequestOutcome) -> None:
        """Queue the request's line."""
        self._lines.put(line_of(call, outcome))

    def close(self) -> None:
        """Write the queued lines."""
        self._lines.close()


def _encode(line: object) -> bytes:
    return printable_json(msgspec.json.encode(line).decode()).encode()


def line_of(call: Call, outcome: RequestOutcome) -> AccessLine:
    """Return the log line of a request."""
    works = outcome.works
    rows = [row for work in works for row in work.rows]
    firsts = [row.created_at - outcome.at + row.ttft_s for row in rows if row.ttft_s is not None]
    return AccessLine(
        time=datetime.fromtimestamp(outcome.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        id=call.request_id,
        client=call.address,
        key=call.key or None,
        agent=call.agent,
        method=call.method,
        path=call.path,
        dialect=call.dialect or None,
        model=works[-1].model if works else None,
        answers=[work.id for work in works],
        status=outcome.status,
        prompt_tokens=call.prompt_tokens,
        cached_tokens=sum(map(_cached_tokens, works)),
        output_tokens=call.output_tokens,
        queue_s=_round(max((row.queued_s for row in rows), default=None)),
        ttft_s=_round(max(0.0, min(firsts)) if firsts else None),
        total_s=round(outcome.total_s, 6),
        finish_reasons=[row.finish or "" for row in rows],
        bytes=outcome.body_bytes,
        error=None if call.failure is None else call.failure.code,
    )


def _cached_tokens(work: EngineWork) -> int:
    """Count each prompt once, however many answers it gets."""
    return sum(row.cached_tokens for row in work.rows[:: work.choices])


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
