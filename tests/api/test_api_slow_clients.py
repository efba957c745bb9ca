"""Who sends or reads too slowly, or nothing at all, is cut off; what it asked for is cancelled."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Coroutine
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from console.api.server import ApiSettings
from tests.api.harness import PATIENCE_S, Served, serving, until
from tests.api.test_api_streams import echo
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.model import fake_spec

pytestmark = pytest.mark.long

BRIEF_S = 0.2


async def connected(api: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection that the server has."""
    address = urlsplit(api.url)
    before = api.server.status().connections
    streams = await asyncio.open_connection(address.hostname, address.port)
    await until(lambda: api.server.status().connections > before)
    return streams


async def dripped(coming: Coroutine[None, None, bytes], writer: asyncio.StreamWriter, drop: bytes) -> bytes:
    """What comes back while `drop` is sent again and again; nothing where the connection ends."""
    received = asyncio.ensure_future(coming)
    async with asyncio.timeout(PATIENCE_S):
        while not received.done():
            writer.write(drop)
            await asyncio.wait((received,), timeout=BRIEF_S / 8)
    return received.result() if received.exception() is None else b""


@pytest.mark.parametrize(
    "begun", [b"", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-A: "], ids=["none", "headers"]
)
async def test_a_connection_whose_request_does_not_get_here_is_closed(tmp_path: Path, begun: bytes) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, idle_timeout_s=BRIEF_S), load=False) as api:
        reader, writer = await connected(api)
        writer.write(begun)
        assert await dripped(reader.read(), writer, b"a" if begun else b"") == b""
        writer.close()
        await until(lambda: api.server.status().connections == 0)
        assert api.server.report().requests == 0


async def test_a_connection_that_asks_nothing_more_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, idle_timeout_s=BRIEF_S), load=False) as api:
        reader, writer = await connected(api)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_drips_is_a_408_and_the_connection_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, body_timeout_s=BRIEF_S)) as api:
        reader, writer = await connected(api)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{")
        head = await dripped(reader.readuntil(b"\r\n\r\n"), writer, b" ")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        assert b"body_too_slow" in await reader.read(1000)
        await dripped(reader.read(), writer, b" ")  # who goes on all the same does not keep it open
        await until(lambda: api.server.status().connections == 0)
        writer.close()
        assert api.engine.publish().totals.requests == 0


async def test_an_answer_that_is_not_taken_in_time_ends_with_what_it_cost(tmp_path: Path) -> None:
    """A reader that takes a little now and then is not silent, and must not hold its request for good."""
    settings = ApiSettings(port=0, total_timeout_s=BRIEF_S)
    async with serving(tmp_path, FakeBackend(gate=Gate(2)), settings=settings) as api:
        reader, writer = await connected(api)
        body = json.dumps({"prompt": "x", "max_tokens": 100, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readuntil(b"[DONE]")
        writer.close()
        await api.until_row(state="finished", finish="cancelled")
        assert [failure.code for failure in api.server.report().failures] == ["request_timeout"]


async def test_an_answer_that_takes_too_long_as_a_whole_is_a_504(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, total_timeout_s=BRIEF_S)
    async with serving(tmp_path, FakeBackend(gate=Gate()), settings=settings) as api:
        error = await api.refusal("/v1/completions", status=504, prompt="x")
        assert error["code"] == "request_timeout"
        await api.until_row(state="finished", finish="cancelled")


async def test_a_reader_that_stops_is_cut_off_its_request_cancelled_and_its_buffers_freed(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, write_timeout_s=BRIEF_S)
    spec = fake_spec(tmp_path, kv_cache_tokens=1_000_000)
    backend = FakeBackend(reply=echo, max_model_len=500_000)
    async with serving(tmp_path, backend, settings=settings, spec=spec) as api:
        body = json.dumps({"prompt": "x" * 100_000, "max_tokens": 300_000, "stream": True}).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(api.url)
        await asyncio.get_running_loop().run_in_executor(None, client.connect, (address.hostname, address.port))
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await api.until_row(state="decode", prompt_tokens=100_000)
        held = most_held(api)
        await api.until_row(state="finished", finish="cancelled")
        await until(lambda: api.server.status().connections == 0)
        client.close()
        assert await held < 4 * 2**20
        await until(lambda: not backend.has_work())
        assert api.server.report().under_way == 0


async def test_a_websocket_that_nobody_reads_is_cut_off_and_its_request_cancelled(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, write_timeout_s=BRIEF_S)
    spec = fake_spec(tmp_path, kv_cache_tokens=1_000_000)
    backend = FakeBackend(reply=echo, max_model_len=500_000)
    async with serving(tmp_path, backend, settings=settings, spec=spec) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(api.url)
        await asyncio.get_running_loop().run_in_executor(None, client.connect, (address.hostname, address.port))
        upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13"
        key = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
        client.sendall(f"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n{key}\r\n\r\n".encode())
        await until(lambda: bool(_connections(api)))
        for connection in _connections(api):
            assert connection.transport is not None
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = json.dumps({"prompt": "x" * 100_000, "max_new_tokens": 300_000, "truncation_length": 499_000}).encode()
        client.sendall(b"\x81\xff" + len(asked).to_bytes(8, "big") + bytes(4) + asked)  # one text frame, masked with 0
        await api.until_row(state="decode", prompt_tokens=100_000)
        await api.until_row(state="finished", finish="cancelled")
        await until(lambda: api.server.status().connections == 0)
        client.close()
        await until(lambda: not backend.has_work())


async def test_a_client_that_takes_nothing_of_whole_answers_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, write_timeout_s=BRIEF_S), load=False) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(api.url)
        await asyncio.get_running_loop().run_in_executor(None, client.connect, (address.hostname, address.port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60)
        await until(lambda: api.server.report().requests > 0)
        await until(lambda: api.server.status().connections == 0)
        assert api.server.report().requests < 60
        client.close()


async def test_a_connection_that_is_closed_before_its_bytes_are_taken_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, write_timeout_s=BRIEF_S), load=False) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(api.url)
        await asyncio.get_running_loop().run_in_executor(None, client.connect, (address.hostname, address.port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60)
        await until(lambda: any(connection._paused for connection in _connections(api)))
        for connection in _connections(api):
            connection.force_close()
        await until(lambda: api.server.status().connections == 0)
        client.close()


@pytest.mark.parametrize("asked", [b"POST /health", b"GET /health", b"POST /nowhere"])
async def test_a_body_that_nobody_would_look_at_is_not_waited_for(tmp_path: Path, asked: bytes) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, body_timeout_s=BRIEF_S), load=False) as api:
        reader, writer = await connected(api)
        writer.write(asked + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n[[")
        async with asyncio.timeout(PATIENCE_S):
            status = (await reader.readuntil(b"\r\n")).split()[1]
        writer.close()
        assert status == {b"POST /health": b"405", b"GET /health": b"200", b"POST /nowhere": b"404"}[asked]


def most_held(api: Served) -> asyncio.Task[int]:
    """The most bytes that wait to be written to any one client, until there is none."""

    async def watch() -> int:
        most = 0
        while connections := _connections(api):
            sizes = [each.transport.get_write_buffer_size() for each in connections if each.transport is not None]
            most = max(most, *sizes, 0)
            await asyncio.sleep(0.01)
        return most

    return asyncio.create_task(watch())


def _connections(api: Served) -> list[asyncio.StreamReaderProtocol]:
    runner = api.server._runner
    return [] if runner is None or runner.server is None else list(runner.server.connections)  # type: ignore[arg-type]
