"""A client that goes away cancels its requests: queued, in prefill, in decode, streaming or not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine.config import EngineConfig
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x", "max_tokens": 1000}
SEVERAL = [("/generate", TEXT), ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
"""Where one may ask for several answers."""

ONE = [
    ("/v1/messages", {**CHAT, "max_tokens": 1000}),
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": "x"}),
    ("/", {"inputs": "x"}),
]
FIXED = [
    ("/generate_stream", {"inputs": "x"}),
    ("/api/v1/generate", {"prompt": "x", "max_new_tokens": 1000}),
    ("/api/v1/generate", {"prompt": "x", "max_length": 1000}),
    ("/api/extra/generate/stream", {"prompt": "x", "max_length": 1000}),
]
"""Where the path says whether the answer is streamed."""


class RawClient:
    """A client that sends one request and can go away at any moment."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: dict[str, Any]) -> RawClient:
        """Send the request; read nothing."""
        address = urlsplit(url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        content = json.dumps(body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content))
        )
        writer.write(content)
        await writer.drain()
        return cls(writer)

    def leave(self) -> None:
        """Close the connection."""
        self._writer.close()


async def assert_cancelled(api: Served, answers: int = 1) -> None:
    """All `answers` of the client that left end, and the worker forgets those it had."""
    await until(lambda: sum(row.finish == "cancelled" for row in api.engine.publish().requests) == answers)
    assert api.backend.gate is not None
    api.backend.gate.open()
    await until(lambda: not api.backend.has_work())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), [*SEVERAL, *ONE], ids=[path for path, _ in (*SEVERAL, *ONE)])
class TestALeavingClient:
    """One client, every endpoint, every phase."""

    async def test_cancels_while_queued(self, tmp_path: Path, path: str, body: dict[str, Any], stream: bool) -> None:
        config = EngineConfig(worker_host="thread", max_prompts=1)
        async with serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api:
            first = asyncio.create_task(api.post("/generate", prompt="first", max_tokens=3))
            await api.until_row(state="prefill")
            client = await RawClient.post(api.url, path, {**body, "stream": stream})
            await api.until_row(state="queued")
            client.leave()
            await assert_cancelled(api)
            assert len((await first)["text"]) == len("first") + 3
            assert len(api.backend.submitted) == 1

    async def test_cancels_in_prefill(self, paced_api: Served, path: str, body: dict[str, Any], stream: bool) -> None:
        client = await RawClient.post(paced_api.url, path, {**body, "stream": stream})
        await paced_api.until_row(state="prefill")
        client.leave()
        await assert_cancelled(paced_api)

    async def test_cancels_in_decode(self, paced_api: Served, path: str, body: dict[str, Any], stream: bool) -> None:
        assert paced_api.backend.gate is not None
        client = await RawClient.post(paced_api.url, path, {**body, "stream": stream})
        paced_api.backend.gate.allow(3)
        await paced_api.until_row(state="decode", output_tokens=3)
        client.leave()
        await assert_cancelled(paced_api)


@pytest.mark.parametrize(("path", "body"), FIXED, ids=["tgi", "textgen", "kobold", "kobold stream"])
async def test_a_client_that_leaves_where_the_path_says_how_to_answer(
    paced_api: Served, path: str, body: dict[str, Any]
) -> None:
    assert paced_api.backend.gate is not None
    client = await RawClient.post(paced_api.url, path, body)
    paced_api.backend.gate.allow(3)
    await paced_api.until_row(state="decode", output_tokens=3)
    client.leave()
    await assert_cancelled(paced_api)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), SEVERAL, ids=["generate", "completions", "chat"])
async def test_a_leaving_client_cancels_every_answer_it_asked_for(
    paced_api: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    assert paced_api.backend.gate is not None
    client = await RawClient.post(paced_api.url, path, {**body, "stream": stream, "n": 3})
    await until(lambda: paced_api.engine.publish().running == 3)
    paced_api.backend.gate.allow(2)
    client.leave()
    await assert_cancelled(paced_api, answers=3)


async def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing(api: Served) -> None:
    address = urlsplit(api.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    await until(lambda: api.server.status().connections == 1)
    writer.close()
    await until(lambda: api.server.status().connections == 0)
    assert api.engine.publish().totals.requests == 0
