"""The first step of a model that was just loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.backends.faults import is_out_of_memory
from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.device_memory import StepOutOfMemory
from engine.backends.torch.pages import PagePool
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampler import SampleRow, sample
from engine.config import SamplingParams
from engine.errors import Detail, InsufficientMemory

CPU_TOKENS = 64
"""Tokens of the warm-up's prompts on a CPU, where nothing is taken or made ready by more of them but time."""


def warm_up(runner: ModelRunner, pool: PagePool, max_prompts: int, step_tokens: int) -> float:
    """Run the largest step there can be, so that its memory is taken and its kernels are ready before the first
    request: step_tokens of prompt, and max_prompts sequences that sample. All write over the same free pages. Then
    decodes are recorded, where that can be. On a CPU a smaller one will do, and the largest is only counted.

    Returns the seconds that such a step takes, reckoned from the smaller one. Raises InsufficientMemory.
    """
    chunks = _largest(runner, pool, max_prompts, step_tokens)
    try:
        computed = chunks
        if runner.on_cpu and step_tokens > CPU_TOKENS:
            runner.foresee(chunks)
            computed = _largest(runner, pool, max_prompts, CPU_TOKENS)
        row = SampleRow(SamplingParams(temperature=1.0, top_p=0.9, seed=0), prompt_ids=[0])
        began_s = time.perf_counter()
        logits = runner.forward(computed)
        sample(logits, [row] * len(computed))
        took_s = time.perf_counter() - began_s
        runner.record_decodes(max_prompts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemory(
            f"the weights and KV pages fit on {', '.join(runner.devices)}, but a step of {step_tokens} tokens and "
            f"{max_prompts} answers does not besides: {error}; take fewer kv_cache_tokens, max_prompts or step_tokens",
            **_numbers(runner, error),
        ) from error
    return took_s * _tokens(chunks) / _tokens(computed)


def _largest(runner: ModelRunner, pool: PagePool, max_prompts: int, step_tokens: int) -> list[ChunkInput]:
    longest = min(step_tokens, runner.config.max_model_len, pool.num_pages * pool.page_tokens)
    pages = list(range(pool.pages_for(longest)))
    chunks = [ChunkInput([0] * longest, 0, pages, sample=True)] * max(1, step_tokens // longest)
    chunks += [ChunkInput([0], longest - 1, pages, sample=True)] * max(0, max_prompts - len(chunks))
    return chunks


def _tokens(chunks: Sequence[ChunkInput]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _numbers(runner: ModelRunner, error: Exception) -> dict[str, Detail]:
    if isinstance(error, StepOutOfMemory):
        return {
            "device": error.device,
            "needed_bytes": error.needed_bytes,
            "free_bytes": error.free_bytes,
            "short_bytes": error.needed_bytes - error.free_bytes,
        }
    return {"device": ", ".join(runner.devices), "free_bytes": runner.free_bytes()}
