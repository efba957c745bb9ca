"""This engine as an operator runs it, with its workers; `mode` joins by "+" how: "int8" or "int4" weights, "http",
"deterministic"."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tools.benchmarks.precisions import of_linear_layers
from tools.benchmarks.protocol import Given, Ready, Work, serve

Prompt = tuple[int, ...]
Ask = Callable[[Prompt, int], Awaitable[int]]
"""Requests an answer of a number of tokens to a prompt, and returns how many came."""

Do = Callable[[Work], Coroutine[Any, Any, int]]


@contextmanager
def loaded(given: Given) -> Iterator[Ready]:
    """Load the model, and serve it where HTTP is asked for."""
    ways = set(given.mode.split("+")) - {""}
    with asyncio.Runner() as runner:
        weights = next(iter(ways - {"http", "deterministic"}), "")
        engine, model = runner.run(started(given, weights=weights, deterministic="deterministic" in ways))
        api = ApiServer(engine, ApiSettings(port=0))
        if "http" in ways:
            runner.run(api.start())
            do = over_http(api)
        else:
            do = in_process(engine)
        yield Ready(lambda work: runner.run(do(work)), of_linear_layers(model.linear, model.dtype))
        runner.run(api.stop(drain_s=0))
        runner.run(engine.close(drain_s=0))


async def load(given: Given) -> Engine:
    """An engine with the model in it."""
    return (await started(given))[0]


async def started(given: Given, *, weights: str = "", deterministic: bool = False) -> tuple[Engine, LoadedModel]:
    """An engine, and what loading the model ended with. hang_s: the driver stops processes between their turns."""
    engine = Engine(EngineConfig(max_prompts=given.clients, max_queue=10_000, hang_s=0))
    await engine.start()
    more: dict[str, Any] = {"weights": weights} if weights else {}
    more |= {"deterministic": True} if deterministic else {}
    tokens = given.clients * given.max_tokens
    model = await engine.load(
        ModelSpec(
            path=given.model, name="model", kv_cache_tokens=tokens, max_model_len=4096, threads=given.threads, **more
        )
    )
    return engine, model


def in_process(engine: Engine) -> Do:
    """Submit to the engine itself."""

    async def ask(prompt: Prompt, tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        stream = engine.submit(GenerateRequest(prompt_ids=list(prompt), params=params))
        return [delta async for delta in stream][-1].output_tokens

    return lambda work: closed_loop(ask, work)


def over_http(api: ApiServer) -> Do:
    """Stream completions from the API's own port, in this process too."""
    url = f"{api.status().url}/v1/completions"

    async def do(work: Work) -> int:
        async with aiohttp.ClientSession() as session:
            return await closed_loop(lambda prompt, tokens: _streamed(session, url, prompt, tokens), work)

    return do


async def _streamed(session: aiohttp.ClientSession, url: str, prompt: Prompt, tokens: int) -> int:
    body = {"prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    usage: dict[str, int] = {}
    async with session.post(url, json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage["completion_tokens"]


async def closed_loop(ask: Ask, work: Work) -> int:
    """The tokens of all answers."""
    prompts = iter(work.prompts)

    async def client() -> int:
        return sum([await ask(prompt, work.output_tokens) for prompt in prompts])

    return sum(await asyncio.gather(*(client() for _ in range(work.clients))))


if __name__ == "__main__":
    serve(loaded, ["torch"])
