"""Whatever bodies a client sends, eight of eight MiB at once: /health is answered in time, and streams go on.

Server, worker, who asks for /health and this test's clients have a process each. What counts is processor time: how
much the server spends before it answers /health, and how long one callback of its loop takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from console.api.http.json_bounds import MAX_VALUES, JsonBounds
from engine.system.child_process import child_environment, python_command
from tests.api.harness import until
from tests.fakes.health_probe import Waits
from tests.fakes.hostile_bodies import BODY_BYTES, KINDS, Hostile, allowed_body
from tests.fakes.timed_server import Held

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

AT_ONCE = 8
CONTEXT = 131_072
MIB = 2**20
HEALTH_S = 0.5
"""Of all threads together, on cores that other programs have halved: at rest nobody waits for 100 ms. Where bodies were
not bounded, it was 1 to 5 s."""
CALLBACK_S = 0.2
JOB_S = 0.4
GROWTH_BYTES = AT_ONCE * (8 + 64) * MIB


class Server:
    """The server as the test sees it, of which another client has a stream."""

    def __init__(
        self, process: asyncio.subprocess.Process, probe: asyncio.subprocess.Process, http: aiohttp.ClientSession
    ) -> None:
        self.process = process
        self.probe = probe
        self.http = http
        self.chunks = 0

    async def held(self) -> Held:
        """What held it up since the last time."""
        return msgspec.json.decode(await _answer(self.process), type=Held)

    async def waits(self) -> Waits:
        """How long /health was waited for since the last time."""
        return msgspec.json.decode(await _answer(self.probe), type=Waits)

    async def listen(self) -> None:
        """Count what comes of a stream that never ends."""
        body = {"prompt": "x", "stream": True, "max_tokens": CONTEXT, "ignore_eos": True}
        while True:
            async with self.http.post("/v1/completions", json=body) as response:
                async for _ in response.content:
                    self.chunks += 1
                    await asyncio.sleep(0.05)  # a reader's pace: the fake model has no other

    async def ask(self, hostile: Hostile) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        headers = {"Content-Type": "application/json", **hostile.headers}
        async with self.http.post(hostile.path, data=hostile.body, headers=headers) as response:
            return response.status, await response.json(content_type=None) if response.status != 200 else None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    async with _process("tests.fakes.timed_server", folder, CONTEXT) as process:
        port = int(await _line(process))
        async with (
            _process("tests.fakes.health_probe", port, process.pid) as probe,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(300)) as http,
        ):
            served = Server(process, probe, http)
            listening = asyncio.create_task(served.listen())
            yield served
            assert not listening.done(), "the stream went on to the end"
            listening.cancel()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_body_that_holds_too_much_holds_nobody_up(server: Server, kind: str) -> None:
    await _storm(server, KINDS[kind](BODY_BYTES))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_body_that_holds_all_that_it_may_holds_nobody_up(server: Server, kind: str) -> None:
    hostile = allowed_body(kind, JsonBounds(max_values=MAX_VALUES + CONTEXT))
    if hostile.body != KINDS[kind](BODY_BYTES).body:  # else it is among the others
        await _storm(server, hostile)


async def _storm(server: Server, hostile: Hostile) -> None:
    await server.waits()
    before, chunks = await server.held(), server.chunks
    answers = await asyncio.gather(*(server.ask(hostile) for _ in range(AT_ONCE)))
    held = await server.held()
    await until(lambda: server.chunks > chunks)
    waits = await server.waits()
    for status, answer in answers:
        assert status in (200, 400, 429), answer
        if status != 200:
            _check_sentence(hostile.path, answer)
    assert waits.answers > 0
    assert waits.cpu_s <= HEALTH_S, f"/health waited for {waits.cpu_s * 1000:.0f} ms of work ({held})"
    assert held.callback_s <= CALLBACK_S, held
    assert held.job_s <= JOB_S, held
    assert held.peak_bytes - before.peak_bytes <= GROWTH_BYTES, held


def _check_sentence(path: str, answer: Any) -> None:
    """One printable sentence, in the shape of the dialect."""
    error = answer.get("error") or answer["detail"]
    sentence = error if isinstance(error, str) else error.get("message") or error["msg"]
    assert sentence.isprintable()
    assert 0 < len(sentence) <= 1000


@asynccontextmanager
async def _process(module: str, *arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", module, *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**child_environment(), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def _answer(process: asyncio.subprocess.Process) -> bytes:
    """The line that answers a line."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    return await _line(process)
