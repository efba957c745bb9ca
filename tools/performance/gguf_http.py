"""Output tokens per second of one GGUF file over HTTP, here and in llama.cpp's own server (xllamacpp), interleaved:
python -m tools.performance.gguf_http FILE. Both have all cores; every prompt is new, and no answer ends early."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from engine.system.child_process import child_environment

_WORDS = [
    "sea",
    "wind",
    "stone",
    "river",
    "light",
    "paper",
    "iron",
    "cloud",
    "garden",
    "winter",
    "letter",
    "mountain",
    "bread",
    "window",
    "music",
    "salt",
]
_READY_S = 600.0
_MAX_S = 600.0


def _prompt(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


async def _ask(http: aiohttp.ClientSession, base: str, prompt: str, tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": False}
    async with http.post(f"{base}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{base}: {answer}")
    return int(answer["usage"]["completion_tokens"])


async def _rate(base: str, clients: int, requests: int, words: int, tokens: int, seed: int) -> float:
    """Output tokens per second with that many clients, each with one request at a time."""
    draw = random.Random(seed)
    waiting = [_prompt(draw, words) for _ in range(requests)]
    made = 0

    async def client(http: aiohttp.ClientSession) -> None:
        nonlocal made
        while waiting:
            count = await _ask(http, base, waiting.pop(), tokens)
            made += count

    timeout = aiohttp.ClientTimeout(total=_MAX_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        return made / (time.perf_counter() - began)


async def _until_ready(base: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _READY_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            if server.poll() is not None:
                raise RuntimeError(f"the server for {base} ended with {server.returncode}")
            try:
                await _ask(http, base, "x", 1)
                return
            except (aiohttp.ClientError, RuntimeError):
                await asyncio.sleep(0.2)
    raise TimeoutError(base)


def _serve_llama_cpp(file: str, port: int, slots: int, context: int, threads: int) -> None:
    import xllamacpp  # type: ignore[import-not-found, unused-ignore]

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.port = file, port
    params.n_ctx, params.n_parallel, params.n_gpu_layers = slots * context, slots, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


async def _compare(arguments: argparse.Namespace) -> None:
    threads = os.cpu_count() or 1
    ports = {"ours": arguments.port, "llama.cpp": arguments.port + 1}
    most = max(arguments.clients)
    commands = {
        "ours": (
            *(sys.executable, "-c", "import ericllm_main; ericllm_main.main()"),
            *("--headless", "--model", str(arguments.file)),
            *("--port", str(ports["ours"]), "--max-prompts", str(most), "--max-model-len", str(arguments.context)),
            *arguments.ours,
        ),
        "llama.cpp": (
            *(sys.executable, "-m", "tools.performance.gguf_http", str(arguments.file), "--serve"),
            *("--port", str(ports["llama.cpp"]), "--clients", str(most), "--context", str(arguments.context)),
        ),
    }
    with ExitStack() as servers:
        bases = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        for name, command in commands.items():
            server = subprocess.Popen(  # noqa: ASYNC220 - it starts in no time
                command,
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            servers.callback(server.wait)
            servers.callback(server.terminate)
            await _until_ready(bases[name], server)
        sys.stdout.write(
            f"{arguments.file.name}, {threads} threads, {arguments.words} words in, {arguments.tokens} out\n"
        )
        for clients in arguments.clients:
            rates: dict[str, list[float]] = {name: [] for name in bases}
            for number in range(arguments.rounds):
                order = list(bases) if number % 2 else list(reversed(bases))
                for name in order:
                    requests = max(arguments.requests, clients)
                    seed = hash((clients, number))
                    rates[name].append(
                        await _rate(bases[name], clients, requests, arguments.words, arguments.tokens, seed)
                    )
            medians = {name: statistics.median(found) for name, found in rates.items()}
            ratio = medians["ours"] / medians["llama.cpp"]
            report = "  ".join(f"{name} {median:.1f} tok/s" for name, median in medians.items())
            sys.stdout.write(f"{clients:3} clients: {report}  ratio {ratio:.2f}\n")
            sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="of each number of clients (default: 5)")
    parser.add_argument("--requests", type=int, default=2, help="of a round, or one for each client (default: 2)")
    parser.add_argument("--words", type=int, default=60, help="in each prompt (default: 60)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    parser.add_argument("--context", type=int, default=1024, help="of each request (default: 1024)")
    parser.add_argument("--port", type=int, default=8600, help="and the next one (default: 8600)")
    parser.add_argument("--ours", nargs="*", default=[], help="further arguments of our server, after --")
    parser.add_argument("--serve", action="store_true", help="serve with llama.cpp alone")
    arguments = parser.parse_args(given)
    if arguments.serve:
        threads = os.cpu_count() or 1
        _serve_llama_cpp(str(arguments.file), arguments.port, arguments.clients[0], arguments.context, threads)
    else:
        asyncio.run(_compare(arguments))


if __name__ == "__main__":
    main()
