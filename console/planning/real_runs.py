"""Requests to a real engine in this process, when they are due."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from console.planning.comparing import Answer
from engine.config import SamplingParams
from engine.engine import Engine
from engine.errors import WorkerFailed
from engine.request import GenerateRequest
from engine.simulation.demand import Ask


async def ask_engine(engine: Engine, vocab_size: int, asks: Sequence[Ask], *, seed: int = 0) -> list[Answer]:
    """Send the requests when they are due, to the engine, and read their answers. seed: of the prompts."""
    source = random.Random(f"{seed} {len(asks)} {asks[-1].at_s}")
    prompts = [source.choices(range(vocab_size), k=ask.prompt_tokens) for ask in asks]
    began_s = asyncio.get_running_loop().time()
    return await asyncio.gather(
        *(_answer(engine, ask, prompt, began_s) for ask, prompt in zip(asks, prompts, strict=True))
    )


async def _answer(engine: Engine, ask: Ask, prompt: list[int], began_s: float) -> Answer:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(began_s + ask.at_s - clock())
    params = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True, seed=0)
    first_s, tokens = 0.0, 0
    async for delta in engine.submit(GenerateRequest(prompt_ids=prompt, params=params, source="bench")):
        if delta.token_ids and not tokens:
            first_s = clock()
        tokens = delta.output_tokens
        if delta.finish not in (None, "length"):
            raise WorkerFailed(delta.error.message if delta.error else f"an answer ended with {delta.finish}")
    return Answer(ask.at_s, first_s - began_s, clock() - began_s, tokens)
