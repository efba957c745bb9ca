"""This engine as an operator runs it, with its workers; `mode` joins by "+" how: "int8" or "int4" weights, "http",
"deterministic", "zig" with the ziglang package's kernels. Settings of a load are "step=256" tokens, or "itl=30"
milliseconds as its target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from engine.backends.base import LoadedModel
from engine.backends.common.native_build import CannotBuild, find_compiler
from engine.config import EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tools.benchmarks.protocol import Answer, Ask, Given, Prompt, Ready, precision_of_dtype, serve
from tools.benchmarks.runners.server import completions

_STEP_TOKENS = 2048
"""The most that a step under a target computes."""


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model, and serve it where HTTP is asked for."""
    ways = set(given.mode.split("+")) - {""}
    weights = next(iter(ways - {"http", "deterministic", "zig"}), "")
    if "zig" in ways and "ziglang" not in find_compiler():
        raise CannotBuild("the ziglang package is not installed")
    engine, model = await started(given, weights=weights, deterministic="deterministic" in ways)
    api = ApiServer(engine, ApiSettings(port=0))
    precision = precision_of(model.linear, model.dtype)

    async def configure(setting: str) -> None:
        name, _, value = setting.partition("=")
        target_s = float(value) / 1e3 if name == "itl" else None
        await engine.reconfigure(step_tokens=_STEP_TOKENS if target_s else int(value))
        await engine.observe({"slo_itl_s": target_s})

    try:
        if "http" in ways:
            await api.start()
            async with completions(api.status().url) as ask:
                yield Ready(precision, ask=ask, configure=configure)
        else:
            yield Ready(precision, ask=in_process(engine), configure=configure)
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
