"""Servers of other engines, over HTTP with streaming, as people use them; `mode` is which, "vllm", "llamacpp" or
"xllamacpp". The client runs here, in our venv; a server runs in the venv of `Given.python`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from tools.benchmarks.protocol import Answer, Ask, Given, Prompt, Ready, serve

MODEL = "model"
_POLL_S = 0.2
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Server:
    """command: from the arguments and a port.  environment: more variables.  packages: whose versions are reported.
    precision: of its linear layers, for a model of some path."""

    command: Callable[[Given, int], list[str]]
    precision: Callable[[Given], str]
    environment: Callable[[Given], Mapping[str, str]] = field(default=lambda _: {})
    packages: tuple[str, ...] = ()


def _vllm(given: Given, port: int) -> list[str]:
    limits = ["--max-num-seqs", str(given.clients), "--max-model-len", str(given.max_tokens)]
    model = ["--model", str(given.model), "--served-model-name", MODEL, "--dtype", "bfloat16"]
    quiet = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--no-enable-log-requests"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [given.python, "-m", "vllm.entrypoints.openai.api_server", *model, *limits, *quiet, *address]


def _vllm_environment(given: Given) -> Mapping[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(given.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{given.threads - 1}",
    }


def _llamacpp(given: Given, port: int) -> list[str]:
    """cache-ram: what slots held is not put aside, as no prompt comes twice."""
    program = Path(given.python).with_name("llama-server")
    threads = ["--threads", str(given.threads), "--threads-batch", str(given.threads)]
    room = ["--ctx-size", str(given.tokens), "--parallel", str(given.clients), "--kv-unified", "--cache-ram", "0"]
    address = ["--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    return [str(program), "--model", str(given.model), *threads, *room, *address]


def _xllamacpp(given: Given, port: int) -> list[str]:
    numbers = [str(number) for number in (port, given.clients, given.tokens, given.threads)]
    return [given.python, "-m", "tools.benchmarks.runners.xllamacpp_server", str(given.model), *numbers]


def _of_gguf(given: Given) -> str:
    """Weights of fewer bits meet rows that are rounded to 8."""
    return "bf16" if "bf16" in given.model.name.lower() else "int8"


SERVERS: Mapping[str, Server] = MappingProxyType(
    {
        "vllm": Server(_vllm, lambda _: "bf16", _vllm_environment, ("vllm_cpu", "torch")),
        "llamacpp": Server(_llamacpp, _of_gguf),
        "xllamacpp": Server(_xllamacpp, _of_gguf, packages=("xllamacpp",)),
    }
)


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Start the server, and wait until it answers. Raises RuntimeError where it ends first."""
    server = SERVERS[given.mode]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *server.command(given, port),
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **server.environment(given)},
    )
    try:
        async with completions(f"http://127.0.0.1:{port}") as ask:
            await _until_ready(ask, process)
            yield Ready(server.precision(given), ask=ask, versions=await _versions(given.python, server.packages))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_ready(ask: Ask, process: asyncio.subprocess.Process) -> None:
    while True:
        if process.returncode is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            await ask((3, 4, 5), 1, Answer())
            return
        except (aiohttp.ClientError, NotServing):
            await asyncio.sleep(_POLL_S)


async def _versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    if not packages:
        return {}
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    asked = await asyncio.create_subprocess_exec(python, "-c", code, *packages, stdout=asyncio.subprocess.PIPE)
    return dict(zip(packages, (await asked.communicate())[0].decode().split(), strict=True))


class NotServing(Exception):
    """The server loads its model."""


@asynccontextmanager
async def completions(url: str, model: str = MODEL) -> AsyncIterator[Ask]:
    """Stream completions from any server with OpenAI's endpoint. The ask raises NotServing, and RuntimeError with the
    server's own words where it refuses or fails."""

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        usage: dict[str, Any] = {}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status == 503:
                raise NotServing
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    for choice in event.get("choices", ()):
                        if choice.get("text") or not choice.get("finish_reason"):  # else the end alone
                            answer.arrived()
                    usage = event.get("usage") or usage
        answer.tokens = usage.get("completion_tokens", answer.tokens)

    # A connection for each request: one that was open while both ends were stopped is closed as soon as they go on.
    timeout, connector = aiohttp.ClientTimeout(), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_READ_BYTES) as session:
        yield ask


if __name__ == "__main__":
    serve(loaded)
