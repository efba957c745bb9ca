"""OpenTelemetry traces: for each request to a model its HTTP span, one span for each answer, and in it queue, prefill
and decode with the engine's times.

Spans are made when a request is over and sent by a thread of the SDK's. Nothing of OpenTelemetry is imported unless an
endpoint is set. Attributes are those of the semantic conventions for HTTP servers and generative AI; the SDK's own
variables hold but for those of the address (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*). Prompts and answers are never part of a span.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from console.api.http.observability import CLIENT_CLOSED_STATUS, EngineWork, RequestOutcome, route_of
from console.api.http.traffic import Call
from engine.config import SamplingParams
from engine.errors import EngineError
from engine.requests.history import WorkerSpan
from engine.snapshot import RequestRow
from engine.system.install_command import install_extra

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

    Attribute = str | bool | int | float | list[str]

SERVICE = "ericllm"
_TRACES_PATH = "/v1/traces"
_FLUSH_MS = 5_000
_SERVER_ERROR = 500


class TracingUnavailable(EngineError):
    """Traces are wanted, and cannot be made."""

    code = "tracing_unavailable"
    http_status = 500


class Phase(NamedTuple):
    """A phase of a request, in seconds since it was submitted. lost: True if its worker died."""

    name: Literal["queue", "prefill", "decode"]
    since_s: float
    until_s: float
    worker: str = ""
    lost: bool = False


class Tracing:
    """A RequestObserver that makes spans. processor: receives them."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("ericllm.api")

    def on_request(self, request: web.Request, call: Call, outcome: RequestOutcome) -> None:
        """Make the spans of a request to a model, as part of its client's trace."""
        if not call.dialect:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        route = route_of(request)
        span = self._tracer.start_span(
            f"{request.method} {route}".strip(),
            context=TraceContextTextMapPropagator().extract(dict(request.headers.items())),
            kind=SpanKind.SERVER,
            start_time=_ns(outcome.at),
            attributes=_http_attributes(request, call, route, outcome),
        )
        if outcome.status >= _SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            context = set_span_in_context(span)
            for work in outcome.works:
                for row, stays in zip(work.rows, work.stays, strict=True):
                    self._trace_answer(context, call.operation, work, row, stays)
        span.end(_ns(outcome.at + outcome.total_s))

    def _trace_answer(
        self, context: Context, operation: str, work: EngineWork, row: RequestRow, stays: Sequence[WorkerSpan]
    ) -> None:
        """Make the span of one answer, and in it those of its phases."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        answer = self._tracer.start_span(
            f"{operation} {work.model}",
            context=context,
            start_time=_ns(row.created_at),
            attributes=_answer_attributes(operation, work, row),
        )
        if row.error is not None:
            answer.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(answer)
        for phase in phases_of(row, stays):
            attributes = {"ericllm.worker": phase.worker} if phase.worker else {}
            since, until = (_ns(row.created_at + each) for each in (phase.since_s, phase.until_s))
            span = self._tracer.start_span(phase.name, context=inside, start_time=since, attributes=attributes)
            if phase.lost:
                span.set_attribute("error.type", "worker_lost")
                span.set_status(Status(StatusCode.ERROR))
            span.end(until)
        answer.end(_ns(row.created_at + row.age_s))

    def close(self) -> None:
        """Send what is left, within seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing:
    """Return traces that are sent to an OTLP/HTTP endpoint, as http://127.0.0.1:4318; without a path it gets the usual.

    Raises TracingUnavailable.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailable(
            f"Traces need {error.name}, which is not installed: `{install_extra('otel')}`, or omit "
            "--otlp-traces-endpoint"
        ) from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_FLUSH_MS / 1000)
    return Tracing(BatchSpanProcessor(exporter))


def traces_url(endpoint: str) -> str:
    """Return the URL to send traces to. Raises TracingUnavailable where `endpoint` is none."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid:
        raise TracingUnavailable(f"{endpoint} is not a URL for traces, such as http://127.0.0.1:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{_TRACES_PATH}"


def phases_of(row: RequestRow, stays: Sequence[WorkerSpan]) -> Iterator[Phase]:
    """Yield the phases of a request in their order. One that lost its worker waits again, and continues on another."""
    at = 0.0
    for stay in stays:
        if not at or stay.since_s > at:
            yield Phase("queue", at, stay.since_s)
        at = row.age_s if stay.until_s is None else stay.until_s
        first = at if row.ttft_s is None else min(max(row.ttft_s, stay.since_s), at)
        if first > stay.since_s or row.ttft_s is None:
            yield Phase("prefill", stay.since_s, first, stay.worker, stay.lost and first == at)
        if row.ttft_s is not None and row.ttft_s <= at:
            yield Phase("decode", first, at, stay.worker, stay.lost)
    if not stays or row.age_s > at:
        yield Phase("queue", at, row.age_s)


def _http_attributes(request: web.Request, call: Call, route: str, outcome: RequestOutcome) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "http.request.method": request.method,
        "http.route": route,
        "http.response.status_code": outcome.status,
        "url.scheme": request.scheme,
        "url.path": call.path,
        "client.address": call.address,
        "user_agent.original": call.agent,
        "ericllm.request_id": call.request_id,
        "ericllm.dialect": call.dialect,
    }
    if call.failure is not None:
        attributes["error.type"] = call.failure.code
    elif outcome.status == CLIENT_CLOSED_STATUS or outcome.status >= _SERVER_ERROR:
        attributes["error.type"] = str(outcome.status)
    return attributes


def _answer_attributes(operation: str, work: EngineWork, row: RequestRow) -> dict[str, Attribute]:
    params, neutral = work.params, SamplingParams()
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": work.model,
        "gen_ai.response.model": work.model,
        "gen_ai.response.id": work.id,
        "gen_ai.request.max_tokens": row.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": row.cached_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "gen_ai.response.finish_reasons": [row.finish or ""],
    }
    for name in ("top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"):
        value = getattr(params, name)
        if value is not None and value != getattr(neutral, name):
            attributes[f"gen_ai.request.{name}"] = value
    if work.choices > 1:
        attributes["gen_ai.request.choice.count"] = work.choices
    if row.error is not None:
        attributes["error.type"] = row.error.code
    return attributes


def _ns(at: float) -> int:
    return round(at * 1e9)
