"""Traces: spans with the engine's own times, in the trace that the client says, sent by OTLP, and only if asked for."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from console.api import context as watching
from console.api.http.tracing import Tracing, TracingUnavailable, phases_of, traces_url
from console.api.server import ApiServer, ApiSettings
from engine.config import EngineConfig
from engine.engine import Engine
from engine.requests.history import WorkerSpan
from engine.snapshot import RequestRow
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import DyingBackend

pytestmark = pytest.mark.long

TRACED = ApiSettings(port=0, otlp_traces_endpoint="http://127.0.0.1:9")
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where spans go instead of an endpoint."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(watching, "open_tracing", lambda _endpoint: Tracing(SimpleSpanProcessor(exporter)))
    return exporter


def named(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def context_of(span: ReadableSpan) -> Any:
    assert span.context is not None
    return span.context


async def test_a_request_is_a_span_with_its_answer_and_its_phases(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with serving(tmp_path, settings=TRACED) as api:
        body = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 3, "temperature": 0.5, "seed": 7}
        answer = await api.post("/v1/chat/completions", **body)
    found = named(spans.get_finished_spans())
    assert set(found) == {"POST /v1/chat/completions", "chat fake", "queue", "prefill", "decode"}
    http, chat = found["POST /v1/chat/completions"], found["chat fake"]
    assert dict(http.attributes or {}) | {"user_agent.original": "", "ericllm.request_id": ""} == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/chat/completions",
        "client.address": "127.0.0.1",
        "user_agent.original": "",
        "ericllm.request_id": "",
        "ericllm.dialect": "openai",
    }
    assert dict(chat.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ericllm",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert [dict(found[name].attributes or {}) for name in ("queue", "prefill")] == [{}, {"ericllm.worker": "w0"}]
    assert (http.kind.name, http.parent, parent_of(chat)) == ("SERVER", None, context_of(http).span_id)
    assert {parent_of(found[name]) for name in ("queue", "prefill", "decode")} == {context_of(chat).span_id}
    assert len({context_of(span).trace_id for span in found.values()}) == 1
    assert "secret" not in "".join(span.to_json() for span in found.values())


async def test_phases_have_the_times_that_the_engine_took(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with serving(tmp_path, settings=TRACED) as api:
        await api.post("/v1/completions", prompt="x", max_tokens=5)
        row = api.engine.publish().requests[0]
    found = named(spans.get_finished_spans())
    queue, prefill, decode = (found[name] for name in ("queue", "prefill", "decode"))
    answer = found["text_completion fake"]
    assert row.ttft_s is not None
    starts = [span.start_time for span in (answer, queue, prefill, decode)]
    ends = [span.end_time for span in (answer, queue, prefill, decode)]
    at = row.created_at
    assert starts == [round(each * 1e9) for each in (at, at, at + row.queued_s, at + row.ttft_s)]
    assert ends == [round(each * 1e9) for each in (at + row.age_s, at + row.queued_s, at + row.ttft_s, at + row.age_s)]


async def test_a_request_that_lost_its_worker_shows_where_it_was(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    dying = DyingBackend(dies_at=3)
    config = EngineConfig(worker_host="thread", restart_backoff_s=0.0)
    async with serving(tmp_path, dying, settings=TRACED, config=config) as api:
        await api.post("/v1/completions", prompt="x", max_tokens=5)
    phases = [span for span in spans.get_finished_spans() if span.name in ("queue", "prefill", "decode")]
    assert [span.name for span in phases] == ["queue", "prefill", "decode", "queue", "decode"]
    assert [span.status.status_code.name for span in phases] == ["UNSET", "UNSET", "ERROR", "UNSET", "UNSET"]
    assert (phases[2].attributes or {})["error.type"] == "worker_lost"
    assert all(one.end_time == other.start_time for one, other in pairwise(phases))


@pytest.mark.parametrize(
    ("row", "stays", "phases"),
    [
        ({"age_s": 3.0}, (), [("queue", 0.0, 3.0)]),
        (
            {"age_s": 3.0},
            (WorkerSpan(worker="w0", since_s=1.0, until_s=3.0),),
            [("queue", 0.0, 1.0), ("prefill", 1.0, 3.0)],
        ),
        (
            {"age_s": 9.0},
            (WorkerSpan(worker="w0", since_s=1.0, until_s=3.0, lost=True),),
            [("queue", 0.0, 1.0), ("prefill", 1.0, 3.0), ("queue", 3.0, 9.0)],
        ),
        (
            {"age_s": 9.0, "ttft_s": 6.0},
            (
                WorkerSpan(worker="w0", since_s=0.0, until_s=3.0, lost=True),
                WorkerSpan(worker="w1", since_s=4.0, until_s=9.0),
            ),
            [
                ("queue", 0.0, 0.0),
                ("prefill", 0.0, 3.0),
                ("queue", 3.0, 4.0),
                ("prefill", 4.0, 6.0),
                ("decode", 6.0, 9.0),
            ],
        ),
    ],
)
def test_phases_follow_one_another(
    row: dict[str, Any], stays: tuple[WorkerSpan, ...], phases: list[tuple[str, float, float]]
) -> None:
    found = phases_of(RequestRow(id="a", source="api", state="finished", **row), stays)
    assert [phase[:3] for phase in found] == phases


async def test_the_client_s_trace_goes_on_here(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "shop=1"}
    async with serving(tmp_path, settings=TRACED) as api:
        async with api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers) as response:
            assert response.status == 200
        http = named(spans.get_finished_spans())["POST /v1/completions"]
        assert f"{context_of(http).trace_id:032x}" == TRACE_ID
        assert f"{parent_of(http):016x}" == PARENT_ID
        assert context_of(http).trace_state.get("shop") == "1"
        spans.clear()
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        async with api.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers) as response:
            assert response.status == 200
    assert not spans.get_finished_spans(), "the client said that this trace is not sampled"


async def test_refusals_and_leavers_are_told_as_what_they_are(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    backend = FakeBackend(gate=Gate())
    async with serving(tmp_path, backend, settings=TRACED) as api:
        await api.refusal("/v1/completions", prompt="x", max_tokens=-1)
        (refused,) = spans.get_finished_spans()
        assert (refused.attributes or {})["error.type"] == "invalid_request"
        assert refused.status.status_code.name == "UNSET"
        spans.clear()
        asking = asyncio.create_task(api.post("/v1/completions", prompt="x", max_tokens=5))
        await api.until_row(state="prefill")
        asking.cancel()
        await asyncio.wait((asking,))
        await api.until_row(finish="cancelled")
        backend.gate.open()  # type: ignore[union-attr]
        await api.server.stop(drain_s=1.0)
    found = named(spans.get_finished_spans())
    assert set(found) == {"POST /v1/completions", "text_completion fake", "queue", "prefill"}
    assert (found["POST /v1/completions"].attributes or {})["error.type"] == "client_left"
    assert (found["text_completion fake"].attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)


async def test_each_of_several_answers_is_told(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with serving(tmp_path, settings=TRACED) as api:
        await api.post("/v1/completions", prompt=["x", "y"], n=2, max_tokens=1)
        await api.get("/health")
    answers = [span for span in spans.get_finished_spans() if span.name == "text_completion fake"]
    assert [(span.attributes or {})["gen_ai.request.choice.count"] for span in answers] == [2] * 4
    assert len(spans.get_finished_spans()) == 1 + 4 * 4, "what is asked by monitoring is no trace"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP receiver: its address, and what it got."""
    got: list[ExportTraceServiceRequest] = []

    async def receive(request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        plain = gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
        got.append(ExportTraceServiceRequest.FromString(plain))
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", receive)
    async with TestServer(app) as server:
        yield str(server.make_url("")), got


async def test_spans_are_sent_by_otlp_and_none_is_lost_at_a_stop(tmp_path: Path) -> None:
    async with collector() as (url, got):
        async with serving(tmp_path, settings=ApiSettings(port=0, otlp_traces_endpoint=url)) as api:
            await api.post("/v1/completions", prompt="x", max_tokens=2)
        resources = [each for message in got for each in message.resource_spans]
        names = [span.name for each in resources for scope in each.scope_spans for span in scope.spans]
    assert sorted(names) == sorted(["POST /v1/completions", "text_completion fake", "queue", "prefill", "decode"])
    service = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert service["service.name"] == "ericllm"


async def test_an_endpoint_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=TRACED) as api:
        assert (await api.post("/v1/completions", prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2


def test_an_endpoint_without_a_path_gets_the_usual_one() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("https://collector/") == "https://collector/v1/traces"
    assert traces_url("http://collector/own/traces") == "http://collector/own/traces"
    for wrong in ("collector:4318", "grpc://collector:4317", "http://", "http://[::1"):
        with pytest.raises(TracingUnavailable, match="is not a URL for traces"):
            traces_url(wrong)


async def test_without_the_extra_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    server = ApiServer(Engine(EngineConfig(worker_host="thread")), TRACED)
    with pytest.raises(TracingUnavailable, match=r"`pip install 'opentelemetry"):
        await server.start()
    assert not server.status().running


async def test_nothing_of_it_is_imported_or_sent_unless_it_is_asked_for(api: Served) -> None:
    program = "import sys, console.api.server; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    ran = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr
    await api.post("/v1/completions", prompt="x", max_tokens=1)
    assert {type(each).__name__ for each in api.server._context.observers} == {"HttpMetrics", "RefusedClients"}
