"""The library's generators over a loaded model, one after the other, with what is slow in them on a GPU put right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.backends.common.exllama_memory import PACKED_ROWS
from engine.backends.exllama.load import Gpus, ModelAndCache
from engine.backends.exllamav2.library import MAX_Q_SIZE
from engine.backends.exllamav2.load_plan import LoadPlan

_logger = logging.getLogger(__name__)

# What a load allocates, in one place, so that it can be given back whole.


@dataclass(slots=True)
class LoadAllocations:
    """The library's objects that own memory. Other references to them (jobs, results) go before `free`.

    models: the main one first.
    """

    gpus: Gpus
    models: list[ModelAndCache] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)
    generator: Any = None

    def close_generator(self) -> None:
        """Drop the generator, and end the threads of its samplers and filters, which would outlive it."""
        generator, self.generator = self.generator, None
        for name in ("sampling_pool", "filter_pool"):
            pool = getattr(generator, name, None)
            if pool is not None:
                pool.shutdown(wait=False)

    def free(self) -> None:
        """Give everything back; idempotent. What fails to unload is logged, and the rest goes all the same."""
        had_any = bool(self.models)
        self.close_generator()
        for adapter in self.adapters:
            _try(adapter.unload)
        self.adapters.clear()
        for part in self.models:
            part.cache = None
            _try(part.model.unload)
        self.models.clear()
        if had_any:
            self.gpus.give_back()


def _try(unload: Callable[[], None]) -> None:
    try:
        unload()
    except Exception:
        _logger.exception("part of the model could not be unloaded")


# The generators over it.

Pinned = Callable[[int], Tensor]
"""Number of elements -> float32 [elements] in memory that a GPU can write to by itself."""


def pinned_floats(elements: int) -> Tensor:
    """Return float32 [elements], pinned where there is a GPU."""
    return torch.empty(elements, pin_memory=torch.cuda.is_available())


@dataclass(frozen=True, slots=True)
class GeneratorMaker:
    """Makes generators over what `allocations` holds, one at a time. Raises RuntimeError once that was given back."""

    plan: LoadPlan
    tokenizer: Any
    allocations: LoadAllocations
    pinned: Pinned = pinned_floats

    def __call__(self) -> Any:
        allocations, plan = self.allocations, self.plan
        if not allocations.models:
            raise RuntimeError("the model has been unloaded")
        allocations.close_generator()
        main, *drafts = allocations.models
        draft = drafts[0] if drafts else ModelAndCache(None)
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
        rows = plan.max_prompts * (1 + plan.draft_tokens)
        if plan.is_packed:
            limit_draft_rows(generator, PACKED_ROWS)
            rows = min(rows, max(plan.max_prompts, PACKED_ROWS))
        generator.model = FloatLogits(main.model, generator, rows, self.pinned)
        if allocations.adapters:
            generator.set_loras(list(allocations.adapters))
        allocations.generator = generator
        return generator


def _sampling_pool(threads: int) -> ThreadPoolExecutor:
    """Threads of which each computes alone: a team of torch's for each of them would be more threads than cores. The
    thread that calls has as many as before."""
    return ThreadPoolExecutor(threads, "sampling", initializer=torch.set_num_threads, initargs=(1,))


class FloatLogits:
    """A generator's model whose logits leave the GPU as float32, for a buffer of the generator's that is pinned and has
    their shape.

    The library copies logits of 16 bits into a strided slice of memory that is not pinned. torch does that by way of a
    buffer of its own, and converts the numbers on the CPU.
    """

    def __init__(self, model: Any, generator: Any, rows: int, pinned: Pinned) -> None:
        """rows: for which there is room at once; for more, a larger buffer is made in the step that has them."""
        self._model = model
        self._generator = generator
        self._pinned = pinned
        self._buffer = pinned(rows * generator.padded_vocab_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward_chunk(self, *args: Any, **options: Any) -> Any:
        """Return what the model's own does: a dict whose "logits", if any, are [sequences, tokens, padded vocab]. The
        generator has the buffer for them then."""
        computed = self._model.forward_chunk(*args, **options)
        if "logits" in computed:
            logits = computed["logits"] = computed["logits"].float()
            if self._buffer.numel() < logits.numel():
                with torch.inference_mode(mode=False):  # threads that sample write to it outside of that mode
                    self._buffer = self._pinned(2 * logits.numel())
            self._generator.logits_pinned = self._buffer[: logits.numel()].view(logits.shape)
        return computed


def limit_draft_rows(generator: Any, max_rows: int) -> None:
    """Let a generator draft in each step as many tokens as leave it no more than `max_rows` rows to compute, and none
    where its sequences alone are more."""
    for name in ("iterate_draftmodel_gen", "iterate_ngram_gen"):
        setattr(generator, name, _limited(generator, getattr(generator, name), max_rows))


def _limited(
    generator: Any, draft: Callable[[list[Any]], Tensor | None], max_rows: int
) -> Callable[[list[Any]], Tensor | None]:
    """The library's method to draft, or one that drafts fewer tokens; it is called without any too: a draft model
    computes the last token of each sequence then, so that its cache has no gap."""

    def drafts(results: list[Any]) -> Tensor | None:
        rows = sum(job.is_prefill_done() for job in generator.active_jobs)
        planned = generator.num_draft_tokens
        generator.num_draft_tokens = number = max(0, min(planned, max_rows // max(1, rows) - 1))
        try:
            drafted = draft(results)
        finally:
            generator.num_draft_tokens = planned
        return drafted[:, :number] if drafted is not None and number else None

    return drafts
