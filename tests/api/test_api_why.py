"""Causes of the time of an answer over HTTP: from the arrival of its request until its client has read the end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import PATIENCE_S, Served, serving, until
from tests.fakes.backend import FakeBackend, Gate

LONG_S = 1e9
BODY_S, PROMPT_S, READ_S = 200_000.0, 100_000.0, 300_000.0
"""So long that what really passes meanwhile is nothing beside it, even on a machine that stands still for a minute."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


class Clock:
    """The loop's clock, which the test sets forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self.ahead_s)
        self.now = loop.time


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the loop that server, engine and client share."""
    return Clock(monkeypatch)


@pytest.fixture
async def gated(tmp_path: Path, clock: Clock) -> AsyncIterator[Served]:
    """A server without time limits, whose backend waits for its gate."""
    settings = ApiSettings(port=0, body_timeout_s=LONG_S, write_timeout_s=LONG_S, ping_s=LONG_S)
    config = EngineConfig(worker_host="thread", hang_s=0.0, timeout_s=0.0)
    async with serving(tmp_path, FakeBackend(gate=Gate()), settings=settings, config=config) as api:
        yield api


def request_of(path: str, **body: Any) -> tuple[bytes, bytes]:
    """The head and the body of a request on a connection of its own."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
    return head.encode(), sent


async def connected(api: Served) -> socket.socket:
    """A connection that is only read where the test reads it."""
    address, client = urlsplit(api.url), socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
    return client


async def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    loop, pieces = asyncio.get_running_loop(), list[bytes]()
    async with asyncio.timeout(PATIENCE_S):
        while piece := await loop.sock_recv(client, 65_536):
            pieces.append(piece)
    client.close()
    return b"".join(pieces)


async def test_the_causes_of_an_answer_add_up_to_the_latency_that_its_client_measured(
    gated: Served, clock: Clock
) -> None:
    client, loop, began = await connected(gated), asyncio.get_running_loop(), clock.now()
    head, body = request_of("/v1/completions", prompt="x", max_tokens=4, why=True)
    await loop.sock_sendall(client, head + body[:1])
    await until(lambda: gated.server.report().under_way == 1)
    clock.ahead_s += BODY_S
    await loop.sock_sendall(client, body[1:])
    await gated.until_row(state="prefill")
    clock.ahead_s += PROMPT_S
    assert gated.backend.gate is not None
    gated.backend.gate.open()
    answer = json.loads((await read_to_end(client)).partition(b"\r\n\r\n")[2])
    latency_ms, why = (clock.now() - began) * 1000, answer["usage"]["why"]
    assert sum(why["causes_ms"].values()) == pytest.approx(latency_ms, rel=0.001)
    assert next(iter(why["causes_ms"])) == "prepare"
    assert why["causes_ms"]["prepare"] == pytest.approx(BODY_S * 1000, rel=0.001)


async def test_a_client_that_reads_a_stream_late_is_charged_for_that(gated: Served, clock: Clock) -> None:
    assert gated.backend.gate is not None
    gated.backend.gate.open()
    client, began = await connected(gated), clock.now()
    body = {**CHAT, "max_tokens": 4000, "logprobs": True, "stream": True, "why": True}
    await asyncio.get_running_loop().sock_sendall(client, b"".join(request_of("/v1/chat/completions", **body)))
    await gated.until_row(state="finished")
    assert gated.server._runner is not None
    server = gated.server._runner.server
    assert server is not None
    await until(lambda: any(connection.writing_paused for connection in server.connections))
    clock.ahead_s += READ_S
    events = [line for line in (await read_to_end(client)).splitlines() if line.startswith(b"data: {")]
    latency_s, last = clock.now() - began, json.loads(events[-1].removeprefix(b"data: "))
    await until(lambda: gated.server.report().under_way == 0)
    why = gated.engine._tracker.detail(last["id"], 0, texts=False).why
    assert why is not None
    for causes_s in (
        {cause: spent / 1000 for cause, spent in last["usage"]["why"]["causes_ms"].items()},
        why.causes,
    ):
        assert sum(causes_s.values()) == pytest.approx(latency_s, rel=0.001)
        assert causes_s["client"] == pytest.approx(READ_S, rel=0.001)


OLLAMA = {"options": {"num_predict": 4}, "why": True}
TGI = {"inputs": "x", "parameters": {"max_new_tokens": 4, "why": True}}
TEXTGEN = {"prompt": "x", "max_new_tokens": 4, "why": True}


async def answers_of(api: Served, path: str, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """The JSON objects of an answer: one, or those of its stream as the dialect of the body has it."""
    if stream and body is TEXTGEN:
        async with api.http.ws_connect("/api/v1/stream") as socket:
            await socket.send_json(body)
            return [json.loads(message.data) async for message in socket]
    if stream and path == "/api/v1/generate":
        path = "/api/extra/generate/stream"
    elif stream and body is TGI:
        path = "/generate_stream"
    elif path.startswith(("/api/chat", "/api/generate")) or stream:
        body = {**body, "stream": stream}
    async with api.http.post(path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", {**CHAT, "max_tokens": 4, "why": True}, "usage"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4, "why": True}, "usage"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4, "why": True}, "usage"),
        ("/generate", {"prompt": "x", "max_tokens": 4, "why": True}, ""),
        ("/v1/messages", {**CHAT, "max_tokens": 4, "why": True}, "usage"),
        ("/api/chat", {**CHAT, **OLLAMA}, ""),
        ("/api/generate", {"prompt": "x", **OLLAMA}, ""),
        ("/generate", TGI, ""),
        ("/api/v1/generate", {"prompt": "x", "max_length": 4, "why": True}, ""),
        ("/api/v1/generate", TEXTGEN, ""),
        ("/completion", {"prompt": "x", "n_predict": 4, "why": True}, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_says_it_where_requested(
    api: Served, path: str, body: dict[str, Any], place: str, stream: bool
) -> None:
    answers = await answers_of(api, path, body, stream=stream)
    if stream and path == "/v1/responses":
        answers = [each["response"] for each in answers if "response" in each]
    found = [why for each in answers if (why := (each.get(place) or {} if place else each).get("why"))]
    assert len(found) == 1
    assert sum(found[0]["causes_ms"].values()) == pytest.approx(found[0]["total_ms"], rel=0.01)
