"""The access log: a line for each request, whole and without texts, and none lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from console.api.http.observability import CannotLog
from console.api.server import ApiServer, ApiSettings
from engine.config import EngineConfig
from engine.engine import Engine
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate

# fmt: off
FIELDS = [
    "time", "id", "client", "key", "agent", "method", "path", "dialect", "model", "answers", "status", "prompt_tokens",
    "cached_tokens", "output_tokens", "queue_s", "ttft_s", "total_s", "finish_reasons", "bytes", "error",
]
# fmt: on


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logging_to(path: Path, **fields: Any) -> ApiSettings:
    return ApiSettings(port=0, access_log=str(path), **fields)


async def test_a_request_is_one_line_with_its_tokens_and_times(tmp_path: Path) -> None:
    path = tmp_path / "log" / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(path, api_key="k-secret")) as api:
        headers = {"X-API-Key": "k-secret", "X-Request-Id": "mine-1", "User-Agent": "tester"}
        body = {"prompt": "my secret words", "max_tokens": 3, "n": 2}
        async with api.http.post("/v1/completions?also=secret", json=body, headers=headers) as response:
            answer = await response.read()
    (line,) = lines_of(path)
    assert list(line) == FIELDS
    assert line["time"].endswith("Z") and line["id"] == "mine-1"
    assert (line["client"], line["agent"], line["method"], line["path"]) == (
        "127.0.0.1",
        "tester",
        "POST",
        "/v1/completions",
    )
    assert (line["dialect"], line["model"], line["answers"]) == ("openai", "fake", [json.loads(answer)["id"]])
    assert (line["status"], line["error"], line["bytes"]) == (200, None, len(answer))
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (15, 0, 6)
    assert line["finish_reasons"] == ["length", "length"]
    assert line["key"] and "k-secret" not in path.read_text()
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]
    assert "secret" not in path.read_text()


async def test_what_was_refused_is_logged_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(path)) as api:
        await api.refusal("/v1/completions", prompt="x", max_tokens=-1)
        async with api.http.get("/nowhere") as response:
            assert response.status == 404
    refused, lost = lines_of(path)
    assert (refused["status"], refused["error"], refused["ttft_s"]) == (400, "invalid_request", None)
    assert (lost["status"], lost["error"], lost["dialect"], lost["answers"]) == (404, "not_found", None, [])


async def test_a_stream_is_logged_with_what_was_sent_of_it(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(path)) as api:
        body = {"prompt": "x", "max_tokens": 4, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            sent = await response.read()
    (line,) = lines_of(path)
    assert (line["bytes"], line["output_tokens"], line["finish_reasons"]) == (len(sent), 4, ["length"])


async def test_a_client_that_left_is_logged_with_what_it_had(tmp_path: Path) -> None:
    path, backend = tmp_path / "access.jsonl", FakeBackend(gate=Gate(2))
    async with serving(tmp_path, backend, settings=logging_to(path)) as api:
        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        async with aiohttp.ClientSession(api.url) as leaving:
            response = await leaving.post("/v1/completions", json=body)
            await response.content.readline()
        await until(lambda: bool(path.read_text()))
    (line,) = lines_of(path)
    assert (line["error"], line["finish_reasons"]) == ("client_left", ["cancelled"])
    assert line["prompt_tokens"] == 1


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(
    ("dialect", "path", "body"),
    [
        ("openai", "/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("openai", "/v1/chat/completions", CHAT),
        ("openai", "/v1/embeddings", {"input": "hi", "model": "fake"}),
        ("generate", "/generate", {"prompt": "hi", "max_tokens": 3}),
        ("tgi", "/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 3}}),
        ("kobold", "/api/v1/generate", {"prompt": "hi", "max_length": 3}),
        ("textgen", "/api/v1/generate", {"prompt": "hi", "max_new_tokens": 3}),
        ("anthropic", "/v1/messages", {**CHAT, "model": "fake"}),
        ("ollama", "/api/generate", {"prompt": "hi", "model": "fake", "options": {"num_predict": 3}}),
        ("ollama", "/api/chat", {"messages": CHAT["messages"], "model": "fake", "options": {"num_predict": 3}}),
    ],
)
async def test_every_dialect_is_logged_with_its_tokens(
    tmp_path: Path, dialect: str, path: str, body: dict[str, Any]
) -> None:
    log = tmp_path / "access.jsonl"
    settings = logging_to(log)
    async with serving(tmp_path, settings=settings) as api, api.http.post(path, json=body) as response:
        answer = await response.read()
        assert response.status == 200, answer
    (line,) = lines_of(log)
    assert (line["dialect"], line["model"], line["status"], line["error"]) == (dialect, "fake", 200, None)
    assert line["prompt_tokens"] >= 2
    assert line["output_tokens"] == (0 if "embeddings" in path else 3)
    assert len(line["answers"]) == len(line["finish_reasons"]) == 1
    assert line["bytes"] == len(answer)


async def test_a_websocket_is_one_line_too(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(log)) as api:
        async with api.http.ws_connect("/api/v1/stream") as socket:
            await socket.send_json({"prompt": "hi", "max_new_tokens": 3})
            while (await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        await until(lambda: bool(log.read_text()))
    (line,) = lines_of(log)
    assert (line["dialect"], line["status"], line["bytes"]) == ("textgen", 101, None)
    assert (line["prompt_tokens"], line["output_tokens"]) == (2, 3)


async def test_bytes_that_are_no_text_do_not_end_the_log(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(path)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
        writer.write(b"GET /%ff HTTP/1.1\r\nHost: localhost\r\nUser-Agent: \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()
        await api.get("/ready")
    assert [line["status"] for line in lines_of(path)] == [404, 200]


async def test_nothing_is_lost_at_a_stop_and_the_next_start_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with serving(tmp_path, settings=logging_to(path)) as api:

        async def ask_often(count: int) -> None:
            for _ in range(count):
                await api.get("/ready")

        await asyncio.gather(*(ask_often(25) for _ in range(8)))
        await api.server.stop(drain_s=1.0)
        assert len(lines_of(path)) == 200
        await api.server.start()
        async with aiohttp.ClientSession(api.url) as http, http.get("/ready") as response:
            assert response.status == 200
        await api.server.stop(drain_s=1.0)
    assert len(lines_of(path)) == 201


async def test_a_log_that_cannot_be_written_keeps_the_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = ApiServer(Engine(EngineConfig(worker_host="thread")), logging_to(tmp_path / "file" / "access.jsonl"))
    with pytest.raises(CannotLog, match=r"The access log .*access\.jsonl cannot be written"):
        await server.start()
    assert not server.status().running
    assert server.status().error is not None


async def test_stdout_is_given_only_where_no_screen_has_it(tmp_path: Path, capfdbinary: Any) -> None:
    server = ApiServer(Engine(EngineConfig(worker_host="thread")), ApiSettings(port=0, access_log="-"))
    with pytest.raises(CannotLog, match="needs --headless"):
        await server.start()
    settings = ApiSettings(port=0, access_log="-", owns_stdout=True)
    async with serving(tmp_path, settings=settings) as api:
        await api.get("/ready")
    assert json.loads(capfdbinary.readouterr().out)["path"] == "/ready"


async def test_there_is_no_log_unless_it_is_asked_for(api: Served) -> None:
    await api.get("/ready")
    assert ApiSettings().access_log is None
    assert [type(watcher).__name__ for watcher in api.server._context.observers] == ["HttpMetrics", "RefusedClients"]
