"""The ExLlamaV3 backend: the library's generator behind the interface that every backend has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.backends.base import BackendRequest, TokenMask
from engine.backends.exllama.generator_backend import GeneratorBackend, Limits, LoadedParts, PageTable
from engine.backends.exllama.requests import Job
from engine.backends.exllamav3.jobs import make_job
from engine.backends.exllamav3.library import PACKAGE, Library, import_library
from engine.backends.exllamav3.loading import load_parts
from engine.backends.parameters import refuse_lacking
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import InvalidRequest


class Exllama3Backend(GeneratorBackend):
    """Backend over exllamav3's generator. What it draws from the logits is our own sampler's."""

    def __init__(
        self,
        import_library: Callable[..., Library] = import_library,
        load_parts: Callable[..., LoadedParts] = load_parts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(import_library, load_parts, clock)

    def limits_of(self, parts: LoadedParts, generator: Any, spec: ModelSpec) -> Limits:
        """Return the capacity of a worker that has loaded `spec`."""
        return Limits(
            pages=parts.pages,
            max_model_len=parts.info.max_model_len,
            max_input_len=spec.max_input_len,
            draft_tokens=parts.draft_tokens,
            places=generator.max_batch_size,
            vocab_size=parts.info.vocab_size,
            spare_tokens=1,
        )

    def refuse_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequest naming the first parameter that cannot be honoured."""
        refuse_lacking(params, PACKAGE.name)

    def make_job(
        self, parts: LoadedParts, request: BackendRequest, *, new_tokens: int, root: bytes, mask: TokenMask | None
    ) -> Job:
        """Make a job for up to `new_tokens` tokens. root: of its scope in the prefix cache: the same for all of it."""
        return make_job(
            parts.library,
            request,
            new_tokens=new_tokens,
            vocab_size=parts.info.vocab_size,
            root=root,
            drafts=parts.draft_tokens > 0,
            mask=mask,
        )

    def page_table(self, generator: Any) -> PageTable:
        """Return the page table of a generator."""
        table: PageTable = generator.pagetable
        return table

    def attach(self, adapter: AdapterSpec) -> int:
        """Refused: no adapter is applied by this backend."""
        raise InvalidRequest(
            f"the exllamav3 backend applies no LoRA adapters, and so not {adapter.name}; --backend torch does",
            param="adapter",
            value=adapter.name,
        )
