"""transformers: `generate` over padded batches ("generate"), or continuous batching with paged SDPA ("continuous")."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteria

from tools.benchmarks.protocol import Answer, Ask, Batch, Given, Prompt, Ready, precision_of_dtype, serve

_PAGE_TOKENS = 256
_NO_TOKEN = -1
_PAD = 0


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model in bfloat16."""
    torch.set_num_threads(given.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()
    precision = precision_of_dtype(str(model.dtype))
    if given.mode == "continuous":
        manager = _manager(model, given)
        yield Ready(precision, ask=_continuous(manager))
        manager.stop(block=False)
    else:
        yield Ready(precision, batch=_static(model))


class _Arrivals(StoppingCriteria):
    """Called after each token; stops nothing."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for answer in self._answers:
            answer.arrived()
        return torch.zeros(len(self._answers), dtype=torch.bool)


def _static(model: Any) -> Batch:
    @torch.inference_mode()
    def answer(prompts: Sequence[Prompt], tokens: int, answers: Sequence[Answer]) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        arrivals = [_Arrivals(answers)]
        model.generate(ids, attention_mask=mask, generation_config=_exactly(tokens), stopping_criteria=arrivals)

    return answer


def _manager(model: Any, given: Given) -> Any:
    pages = given.clients * -(-given.max_tokens // _PAGE_TOKENS)
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=2 * pages,
        max_batch_tokens=given.tokens,
        max_requests_per_batch=given.clients,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(_exactly(given.max_tokens), config)
    manager.start()
    return manager


def _continuous(manager: Any) -> Ask:
    numbers = count()
    running: dict[str, Callable[[Any], None]] = {}
    reading: asyncio.Task[None] | None = None

    async def read() -> None:
        while running:
            output = await asyncio.to_thread(manager.get_result, timeout=1.0)
            if output is not None and output.request_id in running:
                running[output.request_id](output)
            elif not manager.is_running():
                raise RuntimeError("the continuous batching manager stopped")

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        nonlocal reading
        number, whole = f"{next(numbers)}", asyncio.Event()
        failed = ""

        def arrived(output: Any) -> None:
            nonlocal failed
            if len(output.generated_tokens) > answer.tokens:
                answer.arrived(len(output.generated_tokens) - answer.tokens)
            if output.error or output.is_finished():
                failed = output.error or ""
                whole.set()

        running[number] = arrived
        manager.add_request(list(prompt), number, max_new_tokens=tokens, streaming=True)
        if reading is None or reading.done():
            reading = asyncio.ensure_future(read())
        ended = asyncio.ensure_future(whole.wait())
        try:
            await asyncio.wait([ended, reading], return_when=asyncio.FIRST_COMPLETED)
            if not whole.is_set():
                reading.result()
        finally:
            ended.cancel()
            running.pop(number)
            if not whole.is_set():
                manager.cancel_request(number)
        if failed:
            raise RuntimeError(failed)

    return ask


def _exactly(tokens: int) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=_NO_TOKEN, pad_token_id=_PAD
    )


if __name__ == "__main__":
    serve(loaded, ["transformers", "torch"])
