"""Connections: who takes nothing of what is written is cut off, and who takes a little is not."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from console.api.http.connections import (
    FIRST_READ_BYTES,
    MAX_READ_BYTES,
    MIN_READ_BYTES,
    READ_S,
    READERS,
    Runner,
)
from engine.system.child_process import ROOT, python_command


class Pipe(asyncio.Transport):
    """Bytes that wait to be taken: so many at each look, and then no fewer."""

    max_size = 0

    def __init__(self, *waiting: int) -> None:
        super().__init__()
        self.waiting = list(waiting)
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.waiting.pop(0) if len(self.waiting) > 1 else self.waiting[0]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    """A server that has no patience at all."""
    runner = Runner(web.Application(), write_timeout_s=0.0)
    await runner.setup()
    yield runner
    await runner.cleanup()


@pytest.fixture
async def connection(runner: Runner) -> web.RequestHandler:
    """One of its connections."""
    assert runner.server is not None
    return runner.server()


async def test_who_takes_a_little_at_each_look_is_cut_off_when_that_ends(connection: web.RequestHandler) -> None:
    connection.connection_made(pipe := Pipe(100, 90, 80))
    connection.pause_writing()
    async with asyncio.timeout(60):
        await pipe.aborted.wait()
    assert pipe.waiting == [80]


async def test_nobody_looks_any_more_once_most_was_taken_or_the_connection_is_over(
    connection: web.RequestHandler,
) -> None:
    connection.connection_made(pipe := Pipe(100))
    connection.pause_writing()
    connection.resume_writing()
    connection.pause_writing()
    connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not pipe.aborted.is_set()


async def test_less_is_taken_at_once_of_a_connection_whose_bytes_take_long(
    connection: web.RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.connection_made(pipe := Pipe(0))
    assert pipe.max_size == FIRST_READ_BYTES
    for took_s, size in (
        (2 * READ_S, FIRST_READ_BYTES // 4),
        (READ_S / 2, FIRST_READ_BYTES // 4),
        (0.0, FIRST_READ_BYTES // 2),
        (2 * READ_S, MIN_READ_BYTES),
        (2 * READ_S, MIN_READ_BYTES),
        *((0.0, min(MAX_READ_BYTES, MIN_READ_BYTES * 2**times)) for times in range(1, 9)),
    ):
        receive(connection, took_s, monkeypatch)
        assert pipe.max_size == size
    connection.connection_lost(None)


async def test_less_still_is_taken_at_once_of_each_of_many_connections(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.server is not None
    many = [(runner.server(), Pipe(0)) for _ in range(8 * READERS)]
    for connection, pipe in many:
        connection.connection_made(pipe)
    sizes: list[set[int]] = []
    for _ in range(3):
        for connection, _ in many:
            receive(connection, READ_S / 2, monkeypatch)
        await asyncio.sleep(0)
        sizes.append({pipe.max_size for _, pipe in many})
    for connection, _ in many:
        connection.connection_lost(None)
    assert sizes == [{FIRST_READ_BYTES}, {FIRST_READ_BYTES // 4}, {MIN_READ_BYTES}]


def receive(connection: web.RequestHandler, took_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bytes come in that take so long."""
    moments = iter([1.0, 1.0 + took_s])
    monkeypatch.setattr("console.api.http.connections.time.perf_counter", lambda: next(moments))
    connection.data_received(b"GET")
    monkeypatch.undo()


async def asked(port: int, path: str) -> bytes:
    """The status line of an answer, b"" where the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    try:
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_where_there_are_too_many_connections_one_without_a_request_is_closed_for_a_new_one() -> None:
    began, ends = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/long":
            began.set()
            await ends.wait()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/long", answer), web.get("/", answer)])
    runner = Runner(app, write_timeout_s=60.0, max_connections=4)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    long = asyncio.create_task(asked(site.port, "/long"))
    await began.wait()
    idle = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(20)]
    assert await asked(site.port, "/") == b"HTTP/1.1 200 OK\r\n"
    assert runner.server is not None and len(runner.server.connections) <= 5
    ends.set()
    assert await long == b"HTTP/1.1 200 OK\r\n"
    for _, writer in idle:
        writer.close()
    await runner.cleanup()


def test_a_server_may_have_as_many_files_open_as_the_system_lets_it() -> None:
    program = """
import resource
from console.api.http.listening import MIN_CONNECTIONS, RESERVED_FILES, max_connections, raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (512, min(hard, 2000)))
assert max_connections() == 512 - RESERVED_FILES
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 2000)
"""
    subprocess.run(python_command("-c", program), cwd=ROOT, check=True)
