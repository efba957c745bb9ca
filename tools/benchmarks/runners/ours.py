"""This engine as an operator runs it, with its workers; `mode` joins by "+" how: "int8" or "int4" weights, "http",
"deterministic", "step=256" tokens, an "itl=30" of milliseconds as its target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from engine.backends.base import LoadedModel
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tools.benchmarks.protocol import Answer, Ask, Given, Prompt, Ready, precision_of_dtype, serve
from tools.benchmarks.runners.server import completions


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model, and serve it where HTTP is asked for."""
    ways = {name: value for name, _, value in (way.partition("=") for way in given.mode.split("+"))}
    weights = next((name for name in ("int8", "int4") if name in ways), "")
    engine, model = await started(given, weights=weights, deterministic="deterministic" in ways)
    if "step" in ways:
        await engine.reconfigure(step_tokens=int(ways["step"]))
    if "itl" in ways:
        await engine.observe({"slo_itl_s": float(ways["itl"]) / 1e3})
    api = ApiServer(engine, ApiSettings(port=0))
    precision = precision_of(model.linear, model.dtype)
    try:
        if "http" in ways:
            await api.start()
            async with completions(api.status().url) as ask:
                yield Ready(precision, ask=ask)
        else:
            yield Ready(precision, ask=in_process(engine))
    finally:
        await api.stop(drain_s=0)
        await engine.close(drain_s=0)


async def started(given: Given, *, weights: str = "", deterministic: bool = False) -> tuple[Engine, LoadedModel]:
    """An engine, and what loading the model ended with. hang_s: the driver stops processes between their turns."""
    engine = Engine(EngineConfig(max_prompts=given.clients, max_queue=10_000, hang_s=0))
    await engine.start()
    more: dict[str, Any] = {"weights": weights} if weights else {}
    more |= {"deterministic": True} if deterministic else {}
    model = await engine.load(
        ModelSpec(
            path=given.model,
            name="model",
            kv_cache_tokens=given.tokens,
            max_model_len=max(4096, given.max_tokens),
            threads=given.threads,
            **more,
        )
    )
    return engine, model


def in_process(engine: Engine) -> Ask:
    """Submit to the engine itself."""

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        async with engine.submit(GenerateRequest(prompt_ids=list(prompt), params=params)) as stream:
            async for delta in stream:
                if delta.output_tokens > answer.tokens:
                    answer.arrived(delta.output_tokens - answer.tokens)

    return ask


def precision_of(linear: str, dtype: str) -> str:
    """The precision of linear layers. linear: what multiplies, "native avx512_vnni int4": its rows have 8 bits."""
    return "int8" if "int" in linear else precision_of_dtype(dtype)


if __name__ == "__main__":
    serve(loaded, ["torch"])
