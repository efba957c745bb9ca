"""32 streaming clients against the real server: nothing lost, nothing mixed up, whatever dies meanwhile.

8 seconds of it; ERICLLM_SOAK_S=60 makes it a minute.
Nobody reads the server's stderr meanwhile: a full pipe must not stop it either.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import Headless

SOAK_S = float(os.environ.get("ERICLLM_SOAK_S", "8"))
CLIENTS = 32
PROMPTS = 48
PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 240)]


@dataclass
class Tally:
    """What the clients saw."""

    answers: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def body(number: int) -> dict[str, object]:
    """A prompt with a marker, of its own length, with its own number of tokens to come."""
    prompt = f"<{number:03d}>" + chr(97 + number % 26) * (5 + 7 * number % 90)
    return {
        "prompt": prompt,
        "max_tokens": 8 + number % 25,
        "ignore_eos": True,
        "temperature": 0 if number % 2 else 1.0,
        "seed": number,
        "stream": True,
    }


async def complete(session: aiohttp.ClientSession, url: str, number: int) -> str:
    """One streamed answer; raises where the stream ends in anything but a plain finish."""
    text, finish = "", None
    async with session.post(f"{url}/v1/completions", json=body(number)) as answer:
        assert answer.status == 200, await answer.text()
        async for event in events(answer):
            choice = event["choices"][0]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    assert finish == "length", finish
    return text


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, list[dict[str, str]]]]:
    async for line in answer.content:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]" and not data.startswith(":"):
            yield json.loads(data)


async def client(session: aiohttp.ClientSession, url: str, first: int, expected: list[str], tally: Tally) -> None:
    deadline = time.monotonic() + SOAK_S
    number = first
    while time.monotonic() < deadline:
        text = await complete(session, url, number % PROMPTS)
        tally.answers += 1
        if text != expected[number % PROMPTS]:
            tally.wrong.append((str(body(number % PROMPTS)["prompt"]), expected[number % PROMPTS], text))
        number += 7


async def kill_a_worker(server: Headless, after: asyncio.Event) -> None:
    await after.wait()
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one of those that come and go
            if child.name() == "ericllm-worker":
                child.kill()
                return


async def soak(server: Headless, url: str) -> Tally:
    tally, midway = Tally(), asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=CLIENTS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        expected = [await complete(session, url, number) for number in range(PROMPTS)]
        asyncio.get_running_loop().call_later(SOAK_S / 3, midway.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_a_worker(server, midway))
            for first in range(CLIENTS):
                group.create_task(client(session, url, first, expected, tally))
    return tally


def await_metric(url: str, line: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as metrics:
            said = metrics.read().decode()
        if line in said:
            return
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def test_32_streaming_clients_lose_nothing_and_mix_nothing_up(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    flags = ["--headless", "--model", str(model), "--port", "0", "--dtype", "float32", "--num_workers", "2"]
    server = Headless(*flags, "--max_prompts", "8", home=tmp_path)
    try:
        url = server.wait_for(r"listening on (http://\S+)")[1]
        server.wait_for("is ready")
        tally = asyncio.run(soak(server, url))
        await_metric(url, "ericllm_worker_restarts_total 1.0")
        assert tally.wrong == []
        assert tally.answers > CLIENTS
        assert server.end() == 0
    finally:
        server.process.kill()
