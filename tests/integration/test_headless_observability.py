"""A server in a process of its own tells of every request, to stdout and a collector, up to the last before a stop."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import Headless

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

Got = list[ExportTraceServiceRequest]


@pytest.fixture
def collector() -> Iterator[tuple[str, Got]]:
    """An OTLP receiver: its address, and what it got."""
    got: Got = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


def test_the_last_request_before_a_stop_is_logged_and_traced(tmp_path: Path, collector: tuple[str, Got]) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    endpoint, got = collector
    flags = ("--headless", "--model", str(model), "--port", "0", "--access-log", "-")
    with (tmp_path / "stdout").open("wb") as stdout:
        server = Headless(*flags, "--otlp-traces-endpoint", endpoint, home=tmp_path, stdout=stdout)
        try:
            url = server.wait_for(r"listening on (http://\S+)")[1]
            server.wait_for("is ready")
            body = json.dumps({"prompt": "abc", "max_tokens": 4, "ignore_eos": True}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", data=body), timeout=60) as answer:
                answer.read()
            assert server.end() == 0
        finally:
            server.process.kill()
    (line,) = (json.loads(each) for each in (tmp_path / "stdout").read_text().splitlines())
    assert (line["path"], line["status"], line["output_tokens"]) == ("/generate", 200, 4)
    assert 0 < line["ttft_s"] <= line["total_s"]
    resources = [each for message in got for each in message.resource_spans]
    names = [span.name for each in resources for scope in each.scope_spans for span in scope.spans]
    assert sorted(names) == ["POST /generate", "decode", "prefill", "queue", "text_completion tiny"]
