"""transformers: `generate` over padded batches ("generate"), or continuous batching with paged SDPA ("continuous")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tools.benchmarks.precisions import of_dtype
from tools.benchmarks.protocol import Generate, Given, Ready, Work, serve

_PAGE_TOKENS = 256
_NO_TOKEN = -1
_PAD = 0


@contextmanager
def loaded(given: Given) -> Iterator[Ready]:
    """Load the model in bfloat16."""
    torch.set_num_threads(given.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    generate = _continuous(model, given) if given.mode == "continuous" else _static(model)
    yield Ready(generate, of_dtype(str(model.dtype)))


def _static(model: Any) -> Generate:
    @torch.inference_mode()
    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        answers = model.generate(ids, attention_mask=mask, generation_config=_exactly(tokens))
        return int(answers[:, longest:].numel())

    return lambda work: sum(answer(prompts, work.output_tokens) for prompts in work.batches())


def _continuous(model: Any, given: Given) -> Generate:
    pages = given.clients * -(-given.max_tokens // _PAGE_TOKENS)
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=2 * pages,
        max_batch_tokens=given.clients * given.max_tokens,
        max_requests_per_batch=given.clients,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(_exactly(given.max_tokens), config)
    manager.start()
    seen = 0

    def generate(work: Work) -> int:
        nonlocal seen
        waiting = list(work.prompts)[::-1]
        running = tokens = 0
        while waiting or running:
            while waiting and running < work.clients:
                seen += 1
                manager.add_request(list(waiting.pop()), f"{seen}", max_new_tokens=work.output_tokens)
                running += 1
            output = manager.get_result(timeout=1.0)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("the continuous batching manager stopped")
            elif output.is_finished():
                if output.error:
                    raise RuntimeError(output.error)
                tokens += len(output.generated_tokens)
                running -= 1
        return tokens

    return generate


def _exactly(tokens: int) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=_NO_TOKEN, pad_token_id=_PAD
    )


if __name__ == "__main__":
    serve(loaded, ["transformers", "torch"])
