"""Watchers: who is told of every request, as the settings say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.access_log import AccessLog
from console.api.http_metrics import HttpMetrics
from console.api.observing import Watcher
from console.api.settings import ApiSettings
from console.api.tracing import Tracing, open_tracing


class Watchers(Collector):
    """HTTP's metrics always; the access log and traces from `open` to `close`, where they are wanted."""

    def __init__(self) -> None:
        self._http = HttpMetrics()
        self._log: AccessLog | None = None
        self._tracing: Tracing | None = None
        self._lost = 0

    def __iter__(self) -> Iterator[Watcher]:
        return (watcher for watcher in (self._http, self._log, self._tracing) if watcher is not None)

    async def open(self, settings: ApiSettings) -> None:
        """Begin. Raises CannotLog, TracingUnavailable with nothing begun."""
        tracing, log = None, None
        if settings.otlp_traces_endpoint is not None:
            tracing = await asyncio.to_thread(open_tracing, settings.otlp_traces_endpoint)
        try:
            if settings.access_log is not None:
                log = AccessLog(
                    settings.access_log, owns_stdout=settings.owns_stdout, max_bytes=settings.access_log_bytes
                )
                await asyncio.to_thread(log.open)
        except BaseException:
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            raise
        self._tracing, self._log = tracing, log

    async def close(self) -> None:
        """Write and send what is left. Idempotent."""
        log, tracing = self._log, self._tracing
        self._log = self._tracing = None
        if log is not None:
            await asyncio.to_thread(log.close)
            self._lost += log.lost
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    def collect(self) -> Iterator[Metric]:
        """What they counted, for /metrics."""
        yield from self._http.collect()
        lost = self._lost + (self._log.lost if self._log is not None else 0)
        yield CounterMetricFamily("ericllm_access_log_lost_lines", "Lines that could not be written", value=lost)
