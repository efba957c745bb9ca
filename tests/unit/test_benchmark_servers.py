"""Servers of other engines: how their streams are measured, and how their ends are told; verdicts of an ITL target."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.benchmarks import itl_target
from tools.benchmarks.engines import ROWS, SERVER, chosen
from tools.benchmarks.protocol import Answer, Done, Given, Ready, done, work_of
from tools.benchmarks.runners import server
from tools.benchmarks.runners.server import NotServing, Server, completions, loaded

Handler = Callable[[web.Request], "asyncio.Future[web.StreamResponse]"]

CHUNKS = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n',  # half a character
    b'data: {"choices": [{"text": "bc", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n',
)


@asynccontextmanager
async def serving(*chunks: bytes, status: int = 200) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A server that sends these chunks to each request; its address, and the bodies that came."""
    bodies: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/"), bodies


async def test_each_chunk_of_a_stream_is_an_arrival_but_the_end_and_tokens_are_those_of_its_usage() -> None:
    async with serving(*CHUNKS) as (url, bodies), completions(url) as ask:
        answer = Answer()
        await ask((5, 6, 7), 4, answer)
    assert (len(answer.arrivals), answer.tokens) == (3, 4)
    (body,) = bodies
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (4, True, True, 0)


async def test_a_work_is_done_by_as_many_streams_as_clients() -> None:
    async with serving(*CHUNKS) as (url, bodies), completions(url, "theirs") as ask:
        found = await done(Ready("bf16", ask=ask), work_of(3, 0, output_tokens=4))
    assert (found.tokens, len(found.ttft_s), len(found.itl_s)) == (12, 3, 6)
    assert {body["model"] for body in bodies} == {"theirs"}


async def test_a_refusal_is_told_in_the_servers_words() -> None:
    async with serving(b"prompt is too long", status=400) as (url, _), completions(url) as ask:
        with pytest.raises(RuntimeError, match="400: prompt is too long"):
            await ask((5,), 1, Answer())


async def test_an_error_within_a_stream_is_one() -> None:
    event = b'data: {"error": {"message": "out of memory"}}\n\n'
    async with serving(CHUNKS[0], event) as (url, _), completions(url) as ask:
        with pytest.raises(RuntimeError, match="out of memory"):
            await ask((5,), 1, Answer())


async def test_a_server_that_loads_its_model_is_not_serving() -> None:
    async with serving(status=503) as (url, _), completions(url) as ask:
        with pytest.raises(NotServing):
            await ask((5,), 1, Answer())


PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Handler.asked += 1
        self.send_response(503 if Handler.asked == 1 else 200)
        self.end_headers()
        if Handler.asked > 1:
            event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """Arguments for a program that serves from its second request on, or for one that ends."""
    monkeypatch.setattr(
        server,
        "SERVERS",
        {
            "slow": Server(lambda _, port: [sys.executable, "-c", PROGRAM, str(port)], lambda _: "bf16"),
            "ends": Server(lambda _, __: [sys.executable, "-c", "raise SystemExit(3)"], lambda _: "bf16"),
        },
    )
    return Given(tmp_path, 1, 16, 1, "slow", sys.executable)


async def test_a_server_is_asked_until_it_serves_and_ends_with_its_runner(given: Given) -> None:
    async with loaded(given) as ready:
        assert ready.precision == "bf16"
        assert ready.ask is not None
        await ready.ask((3,), 1, Answer())
        ask = ready.ask
    with pytest.raises(RuntimeError):  # its session is closed, as is the server
        await ask((3,), 1, Answer())


async def test_a_server_that_ends_before_it_serves_is_told_at_once(given: Given) -> None:
    ends = Given(given.model, 1, 16, 1, "ends", sys.executable)
    with pytest.raises(RuntimeError, match="the server ended with 3"):
        async with loaded(ends):
            pass


@pytest.mark.parametrize("mode", sorted({row.mode for row in ROWS if row.runner == SERVER}))
def test_a_server_gets_room_for_all_clients_and_the_threads_that_all_have(tmp_path: Path, mode: str) -> None:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "hidden_size": 576, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(str(shape).replace("'", '"'))
    given = Given(tmp_path, 32, 288, 2, mode, "/venv/bin/python")
    kind = server.SERVERS[mode]
    words = kind.command(given, 8123)
    assert "8123" in words
    assert "32" in words
    assert {"9216", "288"} & set(words)
    assert kind.environment(given).get("VLLM_CPU_OMP_THREADS_BIND") == "0-1" if mode == "vllm" else "2" in words


def seen(p99_ms: float, prompt_rate: float) -> list[Done]:
    return [Done(3, 10.0, (1.0,), (0.01, p99_ms / 1e3, p99_ms / 1e3), prompt_rate * 10)]


def test_a_target_is_judged_against_the_best_step_tokens_that_keep_it() -> None:
    static = [seen(40.0, 500.0), seen(58.0, 1000.0), seen(130.0, 3000.0)]
    said = itl_target.verdict(60.0, seen(55.0, 900.0), static)
    assert said == "target 60 ms: p99 55.0 ms is within it; 90% of the best step tokens that keep it"
    said = itl_target.verdict(30.0, seen(35.0, 400.0), static)
    assert said == "target 30 ms: p99 35.0 ms is above it; no step tokens keep it"


def test_settings_and_engines_take_turns_and_one_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    everyone = itl_target.contenders([30.0], [64], chosen(["openvino"]))
    turns: list[str] = []

    def under_load(contender: itl_target.Contender) -> Done | None:
        turns.append(f"{contender.row.key} {contender.setting}")
        return None if turns[-1] == "openvino " else seen(25.0, 100.0)[0]

    found = itl_target.measure(everyone, 2, under_load)
    assert turns == ["ours-http step=64", "ours-http itl=30", "openvino "] * 2
    assert {name: len(each) for name, each in found.items()} == {"step tokens 64": 2, "target 30 ms": 2}
    assert capsys.readouterr().out.count("target 30 ms") == 2
