"""CTranslate2's Generator over batches. The model is CTranslate2's own format; `mode` is its compute type."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ctranslate2

from tools.benchmarks.protocol import Answer, Given, Prompt, Ready, precision_of_dtype, serve


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model."""
    words: list[str] = json.loads((given.model / "vocabulary.json").read_text(encoding="utf-8"))
    generator = ctranslate2.Generator(
        str(given.model), device="cpu", compute_type=given.mode, inter_threads=1, intra_threads=given.threads
    )

    def answer(prompts: Sequence[Prompt], tokens: int, answers: Sequence[Answer]) -> None:
        def arrived(result: Any) -> bool:
            answers[result.batch_id].arrived()
            return False

        generator.generate_batch(
            [[words[number] for number in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=arrived,
        )

    yield Ready(precision_of_dtype(generator.compute_type.partition("_")[0]), batch=answer)


if __name__ == "__main__":
    serve(loaded, ["ctranslate2"])
