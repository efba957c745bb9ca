"""ik_llama.cpp by ik-llama-cpp-python, which has no server and one sequence in a context. Its own sampler fills a list
of all logits from Python for each token; here numpy finds the largest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy
from ik_llama_cpp import IkLlama, _ctypes_api
from ik_llama_cpp._internals import make_batch_range, make_batch_single

from tools.benchmarks.protocol import Answer, Given, Prompt, Ready, serve

_STEP_TOKENS = 512


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model."""
    llama = IkLlama(str(given.model), n_ctx=given.tokens, n_threads=given.threads)
    context, vocabulary = llama._context, llama._model.n_vocab

    def decode(batch: object) -> None:
        status = context.decode(batch)
        _ctypes_api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")

    def largest() -> int:
        logits = numpy.ctypeslib.as_array(context.get_logits(-1), (vocabulary,))
        return int(logits.argmax())

    def answer(prompts: Sequence[Prompt], tokens: int, answers: Sequence[Answer]) -> None:
        for prompt, each in zip(prompts, answers, strict=True):
            context.kv_cache_clear()
            for first in range(0, len(prompt), _STEP_TOKENS):
                chunk = list(prompt[first : first + _STEP_TOKENS])
                decode(make_batch_range(chunk, pos_start=first, logits_last=first + len(chunk) == len(prompt)))
            each.arrived()
            for place in range(len(prompt), len(prompt) + tokens - 1):
                decode(make_batch_single(largest(), place))
                each.arrived()

    yield Ready("bf16" if "bf16" in given.model.name else "int8", batch=answer)
    llama.close()


if __name__ == "__main__":
    serve(loaded, ["ik-llama-cpp-python"])
