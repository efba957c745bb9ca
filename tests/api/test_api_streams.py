"""Streams: pings, late errors, slow readers, and that 32 of them at once mix nothing up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import PATIENCE_S, Served, serving, text_of, until
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.model import fake_spec

CLIENTS = 32


def echo(prompt_ids: Sequence[int], index: int) -> int:
    """An answer that repeats its own prompt for ever."""
    return prompt_ids[index % len(prompt_ids)]


async def test_thirty_two_streams_at_once_each_get_their_own_answer_alone(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=8)
    async with serving(tmp_path, FakeBackend(reply=echo), config=config) as api:

        async def ask(number: int) -> None:
            marker = f"<marker {number:03d}>"
            length = len(marker) * (5 + number % 7)
            events = await api.events("/v1/completions", prompt=marker, max_tokens=length)
            assert events[-1] == "[DONE]"
            assert text_of(events) == marker * (length // len(marker))

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(ask(number))


CHAT = {"messages": [{"role": "user", "content": "x"}]}
SIGNS = "^~|@"
"""Tokens that are in no key and no other value of a chunk."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
        ("/api/chat", CHAT),
        ("/generate", {"prompt": "x", "stream": True}),
        ("/generate_stream", {"inputs": "x"}),
        ("/completion", {"prompt": "x", "stream": True}),
        ("/api/extra/generate/stream", {"prompt": "x"}),
    ],
)
async def test_a_token_is_at_the_client_before_the_next_step_begins(
    path: str, body: dict[str, object], tmp_path: Path
) -> None:
    gate = Gate()
    backend = FakeBackend(gate=gate, reply=lambda _, index: ord(SIGNS[index % len(SIGNS)]))
    async with serving(tmp_path, backend) as api, asyncio.timeout(PATIENCE_S):
        gate.allow()
        async with api.http.post(path, json=body) as response:
            for number, sign in enumerate(SIGNS, start=1):
                await response.content.readuntil(sign.encode())
                assert backend.steps == number
                gate.allow()


async def test_whole_answers_at_once_are_not_mixed_up_either(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=5)
    async with serving(tmp_path, FakeBackend(), config=config) as api:
        prompts = [f"<marker {number:03d}>" for number in range(CLIENTS)]
        answers = await asyncio.gather(*(api.post("/generate", prompt=prompt, max_tokens=9) for prompt in prompts))
    assert [answer["text"] for answer in answers] == [
        prompt + expected_text(list(prompt.encode()), 9) for prompt in prompts
    ]


async def test_a_silent_stream_is_kept_open_by_pings(tmp_path: Path) -> None:
    backend = FakeBackend(gate=Gate())
    async with serving(tmp_path, backend, settings=ApiSettings(port=0, ping_s=0.01)) as api:
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            assert await response.content.readline() == b": ping\n"
            assert await response.content.readline() == b"\n"
            backend.gate.open()  # type: ignore[union-attr]
            rest = (await response.read()).decode()
    frames = [frame for frame in rest.split("\n\n") if frame and not frame.startswith(":")]
    assert frames[-1] == "data: [DONE]"


async def test_a_stream_that_is_silent_for_longer_than_a_write_may_take_goes_on(tmp_path: Path) -> None:
    backend = FakeBackend(gate=Gate())
    settings = ApiSettings(port=0, ping_s=0.02, write_timeout_s=0.05)
    async with serving(tmp_path, backend, settings=settings) as api:
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            for _ in range(20):
                assert await response.content.readline() == b": ping\n"
                assert await response.content.readline() == b"\n"
            backend.gate.open()  # type: ignore[union-attr]
            assert (await response.read()).decode().endswith("data: [DONE]\n\n")
    assert api.server.report().failures == ()


async def test_a_failure_after_the_first_event_is_an_event_and_the_stream_has_no_regular_end(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        events = await api.events("/v1/completions", prompt="x", max_tokens=50)
    assert events[0]["choices"][0]["text"]
    assert events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


async def test_an_unforeseen_failure_in_a_stream_is_an_event_without_its_traceback(
    api: Served, monkeypatch: object
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("the secret path")

    monkeypatch.setattr("console.api.dialects.openai.completions._Call.send", broken)  # type: ignore[attr-defined]
    events = await api.events("/v1/completions", prompt="x")
    assert [event["error"]["code"] for event in events] == ["internal_error"]
    assert "secret" not in events[0]["error"]["message"]
    await api.until_row(state="finished", finish="cancelled")


async def test_a_stream_that_the_operator_cancels_ends_with_an_error(paced_api: Served) -> None:
    asking = asyncio.create_task(paced_api.events("/v1/completions", prompt="x"))
    await paced_api.until_row(state="prefill")
    paced_api.engine.cancel(paced_api.engine.publish().requests[0].id)
    assert [event["error"]["code"] for event in await asking] == ["request_cancelled"]


async def test_a_reader_that_stops_reading_holds_up_nobody_and_is_cut_off(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, write_timeout_s=0.2)
    spec = fake_spec(tmp_path, kv_cache_tokens=1_000_000)
    async with serving(tmp_path, FakeBackend(reply=echo, max_model_len=500_000), settings=settings, spec=spec) as api:
        body = json.dumps({"prompt": "x" * 400_000, "max_tokens": 5000, "stream": True}).encode()
        reader = _dead_reader(
            api.url, b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        reader.sendall(body)
        await api.until_row(state="decode", prompt_tokens=400_000)
        other = {"prompt": "other", "max_tokens": 10}
        async with api.http.post("/generate", json=other, headers={"Connection": "close"}) as response:
            assert await response.json() == {"text": "other" * 3}
        await until(lambda: api.server.status().connections == 0)
        reader.close()


def _dead_reader(url: str, head: bytes) -> socket.socket:
    """A client with a small receive buffer that has sent `head` and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = urlsplit(url)
    client.connect((address.hostname, address.port))
    client.sendall(head)
    return client
