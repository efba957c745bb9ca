"""The library's generators: one after the other over the same model and caches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from engine.backends.exllama.holdings import Held, Holdings
from engine.backends.exllama.parts import MAX_Q_SIZE
from engine.backends.exllama.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class GeneratorMaker:
    """Makes generators over what `holdings` holds, one at a time. Raises RuntimeError once that was given back."""

    plan: LoadPlan
    tokenizer: Any
    holdings: Holdings

    def __call__(self) -> Any:
        held, plan = self.holdings, self.plan
        if not held.models:
            raise RuntimeError("the model has been unloaded")
        held.close_generator()
        main, draft = held.models[0], held.models[1] if len(held.models) > 1 else Held(None)
        chunk_tokens = main.model.config.max_input_len
        generator = plan.library.generator(
            model=main.model,
            cache=main.cache,
            tokenizer=self.tokenizer,
            max_batch_size=chunk_tokens // MAX_Q_SIZE,
            max_chunk_size=chunk_tokens,
            max_q_size=MAX_Q_SIZE,
            draft_model=draft.model,
            draft_cache=draft.cache,
            num_draft_tokens=plan.draft_tokens,
            use_ngram_draft=plan.spec.ngram_draft,
            paged=True,
        )
        generator.sampling_pool.shutdown(wait=False)  # it has started no thread yet
        generator.sampling_pool = _sampling_pool(generator.max_sampling_threads)
        if held.adapters:
            generator.set_loras(list(held.adapters))
        held.generator = generator
        return generator


def _sampling_pool(threads: int) -> ThreadPoolExecutor:
    """Threads of which each computes alone: a team of torch's for each of them would be more threads than cores. The
    thread that calls has as many as before."""
    return ThreadPoolExecutor(threads, "sampling", initializer=torch.set_num_threads, initargs=(1,))
