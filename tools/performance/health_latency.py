"""How long /health waits while one client sends bodies that are made to hold a server up, eight of each kind at once.

    python -m tools.performance.health_latency [--context TOKENS] [--rounds 2] [KIND ...]

The server, who asks for /health a hundred times a second, and who sends have a process each. Prints for each kind the
answer, the longest that /health took and the most processor time that the server spent before it answered that, the
processor time of the longest callback of its loop and of the longest piece of work off the loop, and what its memory
grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from console.api.http.json_bounds import MAX_VALUES, JsonBounds
from console.api.http.request_body import LONG_BODY
from tests.fakes.health_probe import Waits
from tests.fakes.hostile_bodies import BODY_BYTES, KINDS, Hostile, allowed_body
from tests.fakes.timed_server import Held

AT_ONCE = 8
_PATIENCE_S = 120.0
_SHORT_ROUNDS = 16
"""Of short bodies more are sent, so that there is something to see."""


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="How long /health waits while hostile bodies come.")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--allowed", action="store_true", help="bodies that hold no more than is parsed")
    parser.add_argument("kinds", nargs="*", help="of KINDS in tests/fakes/hostile_bodies.py; all where none is named")
    options = parser.parse_args()
    print("| eight bodies of | answer | /health, longest | its processor time | callback | job | memory | took |")
    print("|---" * 8 + "|")
    bounds = JsonBounds(max_values=MAX_VALUES + options.context)
    for kind in options.kinds or KINDS:
        hostile = allowed_body(kind, bounds) if options.allowed else KINDS[kind](BODY_BYTES)
        async with _served(options.context) as server:
            await _measure(server, kind, hostile, options.rounds)


async def _measure(server: asyncio.subprocess.Process, kind: str, hostile: Hostile, rounds: int) -> None:
    port = int(await _line(server))
    watcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tests.fakes.health_probe", str(port), str(server.pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    await _ask_line(watcher)
    before = msgspec.json.decode(await _ask_line(server), type=Held)
    began_s = time.monotonic()
    answers: Counter[str] = Counter()
    timeout = aiohttp.ClientTimeout(_PATIENCE_S)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:
        for _ in range(rounds if len(hostile.body) > LONG_BODY else _SHORT_ROUNDS):
            answers.update(await asyncio.gather(*(_ask(http, hostile) for _ in range(AT_ONCE))))
    took_s = time.monotonic() - began_s
    usage = msgspec.json.decode(await _ask_line(server), type=Held)
    waits = msgspec.json.decode(await _ask_line(watcher), type=Waits)
    assert watcher.stdin is not None
    watcher.stdin.close()
    await watcher.wait()
    grew = (usage.peak_bytes - before.peak_bytes) / 2**20
    answer = answers.most_common(1)[0][0]
    spent = (waits.clock_s, waits.cpu_s, usage.callback_s, usage.job_s)
    times = " | ".join(f"{seconds * 1000:.0f} ms" for seconds in spent)
    print(f"| {kind} | {answer} | {times} | {grew:.0f} MiB | {took_s:.1f} s |", flush=True)
    print("   ", usage.callback[:150], file=sys.stderr, flush=True)


async def _ask(http: aiohttp.ClientSession, hostile: Hostile) -> str:
    headers = {"Content-Type": "application/json", **hostile.headers}
    try:
        async with http.post(hostile.path, data=hostile.body, headers=headers) as response:
            text = await response.text()
            return f"{response.status} {text[:100] if response.status != 200 else len(text)}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


@asynccontextmanager
async def _served(context: int) -> AsyncIterator[asyncio.subprocess.Process]:
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tests.fakes.timed_server", folder, str(context)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _ask_line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    return await _line(process)


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


if __name__ == "__main__":
    asyncio.run(main())
