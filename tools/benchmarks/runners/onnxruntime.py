"""onnxruntime-genai's Generator over padded batches. The model is made by its own builder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy
import onnxruntime_genai

from tools.benchmarks.protocol import Answer, Given, Prompt, Ready, serve

_PAD = 0


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model; `mode` is the kind of its weights, fp32 or int4, whose rows are rounded to 8 bits."""
    config = onnxruntime_genai.Config(str(given.model))
    config.clear_providers()
    model = onnxruntime_genai.Model(config)

    def answer(prompts: Sequence[Prompt], tokens: int, answers: Sequence[Answer]) -> None:
        longest = max(map(len, prompts))
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            batch_size=len(prompts),
            do_sample=False,
            min_length=longest + tokens,
            max_length=longest + tokens,
        )
        generator = onnxruntime_genai.Generator(model, params)
        padded = [[_PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        generator.append_tokens(numpy.array(padded, dtype=numpy.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            for each in answers:
                each.arrived()

    yield Ready("int8" if given.mode == "int4" else "f32", batch=answer)


if __name__ == "__main__":
    serve(loaded, ["onnxruntime-genai", "onnxruntime"])
