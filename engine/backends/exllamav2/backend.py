"""The ExLlamaV2 backend: the library's generator behind the interface that every backend has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.backends.base import BackendRequest, TokenEvent, TokenMask
from engine.backends.exllama.generator_backend import GeneratorBackend, Limits, LoadedParts, PageTable
from engine.backends.exllama.requests import Job
from engine.backends.exllamav2.jobs import make_job, prompts_of_step
from engine.backends.exllamav2.library import Library, import_library
from engine.backends.exllamav2.loading import load_parts
from engine.backends.exllamav2.sampling import refuse_unsupported
from engine.backends.scheduler.scheduler import PromptShares
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import InvalidRequest


class ExllamaBackend(GeneratorBackend):
    """Backend over exllamav2's dynamic generator, which is its own page table. Clients share the prompt tokens of a
    step: the library computes a chunk of every prompt in each."""

    def __init__(
        self,
        import_library: Callable[..., Library] = import_library,
        load_parts: Callable[..., LoadedParts] = load_parts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(import_library, load_parts, clock)
        self._shares = PromptShares()
        self._prompts: set[str] | None = None

    def step(self) -> Sequence[TokenEvent]:
        """One iteration of the generator, and the tokens it gave."""
        self._prompts = None
        return super().step()

    def limits_of(self, parts: LoadedParts, generator: Any, spec: ModelSpec) -> Limits:
        """Return the capacity of a worker that has loaded `spec`."""
        return Limits(
            pages=parts.pages,
            max_model_len=parts.info.max_model_len,
            max_input_len=spec.max_input_len,
            draft_tokens=parts.draft_tokens,
            places=generator.max_batch_size,
            vocab_size=parts.info.vocab_size,
            # the library takes it for granted that the tokens are there which it looks for in the text before
            min_prompt=generator.max_ngram - 1 if generator.use_ngram_draft else 1,
        )

    def refuse_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequest naming the first parameter that cannot be honoured."""
        refuse_unsupported(params)

    def make_job(
        self, parts: LoadedParts, request: BackendRequest, *, new_tokens: int, root: bytes, mask: TokenMask | None
    ) -> Job:
        """Make a job for up to `new_tokens` tokens. root: of its scope in the prefix cache: the same for all of it."""
        return make_job(
            parts.library,
            request,
            new_tokens=new_tokens,
            draft_tokens=parts.draft_tokens,
            vocab_size=parts.info.vocab_size,
            root=root,
            computes=partial(self._computes, request.id),
            mask=mask,
        )

    def _computes(self, request_id: str) -> bool:
        """Return whether the step under way computes a chunk of a request's prompt. The step starts requests first, so
        which it computes is decided when it asks for the first time."""
        if self._prompts is None:
            self._prompts = prompts_of_step(self._queue.running, self._shares, self._generator.max_chunk_size)
        return request_id in self._prompts

    def page_table(self, generator: Any) -> PageTable:
        """Return the page table of a generator."""
        table: PageTable = generator
        return table

    def attach(self, adapter: AdapterSpec) -> int:
        """Refused: the library applies an adapter to every request, so it is chosen with the model (--lora)."""
        raise InvalidRequest(
            f"the exllamav2 backend cannot attach {adapter.name} at runtime; load the model with --lora",
            param="adapter",
            value=adapter.name,
        )
