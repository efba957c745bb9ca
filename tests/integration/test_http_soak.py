"""500 keep-alive clients, of which a third leave whenever they like and a tenth read slowly: nothing of them stays.

5 seconds of it; ERICLLM_SOAK_S=120 makes it two minutes, and then how soon /health answers counts too. Server and
worker have a process each, the clients are this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from engine.system.child_process import child_environment
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.watched_server import Holding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOAK_S = float(os.environ.get("ERICLLM_SOAK_S", "5"))
TIMED_S = 120.0
CLIENTS = 500
MAX_PROMPTS = 64
WARM_S = 3.0
PATIENCE_S = 60.0
PAUSE_S = 4.0
"""The longest that a client thinks before it asks again. None that does would only measure how 500 requests are worked
off that came at once."""
HEALTH_P99_S = 0.1
GROWTH_BYTES = 32 * 2**20
"""What memory may have grown by: records of requests, lines of the log and the allocator's own holes."""

HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"


class Server:
    """The server as the test sees it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def holding(self) -> Holding:
        """What it holds now."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        return msgspec.json.decode(await self.process.stdout.readline(), type=Holding)

    async def at_rest(self) -> Holding:
        """What it holds once nobody asks for anything any more and no connection waits to be taken and closed: the same
        twice. After a while, what it holds then."""
        until_s = time.monotonic() + PATIENCE_S
        holding = await self.holding()
        while True:
            await asyncio.sleep(0.25)
            before, holding = holding, await self.holding()
            busy = holding.live or holding.under_way or holding.clients or holding.pages_used
            same = holding.descriptors == before.descriptors and holding.living == before.living
            if (same and not busy) or time.monotonic() > until_s:
                return holding


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.fakes.watched_server", str(model), str(MAX_PROMPTS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**child_environment(), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Server(process, int(await process.stdout.readline()))
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def asked(chance: random.Random, number: int) -> bytes:
    """A request of one of several kinds, streamed or not."""
    prompt, tokens, stream = f"<{number}> " + "a" * chance.randrange(60), 1 + chance.randrange(32), number % 2 == 0
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens},
        "/generate": {"prompt": prompt, "max_tokens": tokens, "stream": stream},
    }
    path = chance.choice(list(bodies))
    body = json.dumps(bodies[path])
    return (HEAD.format(path=path, length=len(body)) + body).encode()


async def answer(reader: asyncio.StreamReader, *, slowly: bool = False) -> int:
    """Read one answer to its end; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length: " in head:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    else:
        while length := int(await reader.readline(), 16):
            await reader.readexactly(length + 2)
            if slowly:
                await asyncio.sleep(0.05)
        await reader.readexactly(2)
    return int(head.split(b" ", 2)[1])


async def client(port: int, number: int, until_s: float, statuses: Counter[int | str]) -> None:
    """Ask again and again over one connection; who leaves does so in the middle, and comes back on another one."""
    chance = random.Random(number)
    leaves, slowly = number % 3 == 0, number % 10 == 1
    await asyncio.sleep(chance.uniform(0.0, 1.0))
    while time.monotonic() < until_s:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096 if slowly else 2**16)
        try:
            async with asyncio.timeout(chance.uniform(0.0, 3.0) if leaves else None):
                while time.monotonic() < until_s:
                    writer.write(asked(chance, number))
                    statuses[await answer(reader, slowly=slowly)] += 1
                    await asyncio.sleep(chance.uniform(0.0, min(PAUSE_S, max(0.0, until_s - time.monotonic()))))
        except TimeoutError:
            statuses["left"] += 1
            writer.transport.abort()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def health(port: int, seconds: float) -> list[float]:
    """How long /health takes, each time, as a process sees it that does nothing else."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.fakes.health_watch", str(port), str(seconds)),
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    return [float(took_s) for took_s in json.loads(told)]


async def soak(port: int, seconds: float) -> tuple[Counter[int | str], list[float]]:
    """What clients were answered, and how long /health took each time."""
    until_s = time.monotonic() + seconds
    statuses: Counter[int | str] = Counter()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(health(port, seconds))
        for number in range(CLIENTS):
            group.create_task(client(port, number, until_s, statuses))
    return statuses, watching.result()


async def test_500_clients_that_leave_and_dawdle_leave_nothing_behind(tmp_path: Path) -> None:
    async with served(make_tiny_model(tmp_path / "tiny")) as server:
        await soak(server.port, WARM_S)
        before = await server.at_rest()
        statuses, took_s = await soak(server.port, SOAK_S)
        after = await server.at_rest()
    p99_s = sorted(took_s)[int(0.99 * (len(took_s) - 1))]
    grown = [(now - then) / 2**20 for now, then in zip(after.rss_bytes, before.rss_bytes, strict=True)]
    print(f"\n{SOAK_S:g} s: {dict(statuses)}; /health p99 {1e3 * p99_s:.1f} ms, longest {1e3 * max(took_s):.1f} ms; "
          f"grown by {grown[0]:.1f} and {grown[1]:.1f} MiB; {before.living} -> {after.living}; "
          f"{before.descriptors} -> {after.descriptors}")  # fmt: skip
    assert set(statuses) == {200, "left"}
    assert statuses["left"] >= CLIENTS // 3
    assert (after.live, after.under_way, after.clients, after.pages_used) == (0, 0, 0, 0)
    assert after.living == before.living
    assert after.descriptors == before.descriptors
    assert after.errors == []
    assert max(grown) * 2**20 < GROWTH_BYTES
    if SOAK_S >= TIMED_S:
        assert p99_s < HEALTH_P99_S
