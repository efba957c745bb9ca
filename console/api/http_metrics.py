"""HTTP requests by route, method and kind of status, under the names that vLLM's server has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.observing import Outcome, handler_of
from console.api.traffic import Call
from engine.usage import HistogramCounter

DURATION_BOUNDS_S = (0.1, 0.5, 1.0)
_UNCOUNTED = frozenset({"/metrics", "/health", "/ready"})
"""What monitoring itself asks: a probe's 503 while a model loads is no request that failed."""


class HttpMetrics(Collector):
    """A Watcher that counts. Belongs to the engine's loop, as its registry does."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._durations: dict[tuple[str, str], HistogramCounter] = {}

    def saw(self, request: web.Request, call: Call, outcome: Outcome) -> None:
        """Count a request."""
        route = handler_of(request) or "none"
        if route in _UNCOUNTED:
            return
        method = request.method if request.method in _METHODS else "other"
        self._requests[route, method, f"{outcome.status // 100}xx"] += 1
        took = self._durations.setdefault((route, method), HistogramCounter(DURATION_BOUNDS_S))
        took.observe(outcome.total_s)

    def collect(self) -> Iterator[Metric]:
        """The counts now."""
        requests = CounterMetricFamily("http_requests", "HTTP requests", labels=["handler", "method", "status"])
        for labels, count in sorted(self._requests.items()):
            requests.add_metric(labels, count)
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Time until an HTTP request was answered", labels=["handler", "method"]
        )
        for of, counter in sorted(self._durations.items()):
            told = counter.freeze()
            buckets = [*zip(map(repr, told.bounds), map(float, told.counts), strict=True), ("+Inf", float(told.count))]
            durations.add_metric(of, buckets, told.sum)
        yield from (requests, durations)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""All others are one: clients may make up any."""
