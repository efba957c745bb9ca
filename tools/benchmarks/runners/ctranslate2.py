"""CTranslate2's Generator over batches. The model is CTranslate2's own format; `mode` is its compute type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import ctranslate2

from tools.benchmarks.precisions import of_compute_type
from tools.benchmarks.protocol import Given, Ready, Work, serve


@contextmanager
def loaded(given: Given) -> Iterator[Ready]:
    """Load the model."""
    words: list[str] = json.loads((given.model / "vocabulary.json").read_text(encoding="utf-8"))
    generator = ctranslate2.Generator(
        str(given.model), device="cpu", compute_type=given.mode, inter_threads=1, intra_threads=given.threads
    )

    def generate(work: Work) -> int:
        tokens = 0
        for prompts in work.batches():
            answers = generator.generate_batch(
                [[words[number] for number in prompt] for prompt in prompts],
                max_length=work.output_tokens,
                min_length=work.output_tokens,
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            tokens += sum(len(answer.sequences_ids[0]) for answer in answers)
        return tokens

    yield Ready(generate, of_compute_type(generator.compute_type))


if __name__ == "__main__":
    serve(loaded, ["ctranslate2"])
