"""A library and a loader without a GPU: what an ExllamaBackend under test is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from engine.backends.base import LoadedModel, LoadPhase, LoadProgress
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllama.load import ModelAndCache
from engine.backends.exllamav2.backend import ExllamaBackend
from engine.backends.exllamav2.generator import GeneratorMaker, LoadAllocations, Pinned, pinned_floats
from engine.backends.exllamav2.library import Library
from engine.config import ModelSpec
from engine.errors import LoadCancelled
from tests.fakes.exllama_generator import FakeGenerator, Faults, Logits, hash_logits
from tests.fakes.exllama_job import PAGE, FakeJob, FakeSettings, page_hash
from tests.fakes.exllama_kernels import ByteTokenizer, PagedTokens, TokenModel, real_modules
from tests.fakes.exllama_model import FakeGpus
from tests.fakes.model import VOCAB_SIZE


def unsure(logits: Logits) -> Logits:
    """A draft model that guesses as the model says, but for every third position."""
    return lambda ids, vocab_size: logits(ids, vocab_size) * (-1 if len(ids) % 3 == 0 else 1)


PHASES: tuple[LoadPhase, ...] = ("weights", "kv_cache")


class FakeExllama:
    """A library and a loader whose generators are fakes.

    generators: those made so far, the last one in use.   freed: how often the memory was given back.
    faults: errors to come, also from "make_generator".   logits: what the model says.
    """

    def __init__(
        self,
        *,
        pages: int = 16,
        max_model_len: int = 2048,
        max_chunk_size: int = 512,
        draft_tokens: int = 0,
        ngram: bool = False,
        places: int = 32,
        logits: Logits = hash_logits,
    ) -> None:
        self.pages = pages
        self.max_model_len = max_model_len
        self.max_chunk_size = max_chunk_size
        self.draft_tokens = draft_tokens
        self.ngram = ngram
        self.places = places
        self.logits = logits
        self.faults = Faults()
        self.generators: list[Any] = []
        self.freed = 0
        self.max_prompts = 0

    def backend(self) -> ExllamaBackend:
        """A backend over these fakes, with nothing loaded."""
        return ExllamaBackend(self.import_library, self.load_parts)

    def import_library(
        self, report: Callable[[LoadProgress], None], *, spec: ModelSpec, cancelled: Callable[[], bool]
    ) -> Library:
        """The fake classes."""
        report(LoadProgress(phase="kernels", done=1, total=1, unit="files"))
        unused: Any = None
        return Library(
            config=unused,
            model=unused,
            caches={},
            cache_tp=unused,
            tokenizer=unused,
            generator=FakeGenerator,
            job=FakeJob,
            page_hash=page_hash,
            settings=FakeSettings,
            lora=unused,
            attention="fake",
            attention_reason="nothing is computed",
        )

    def load_parts(
        self,
        library: Library,
        spec: ModelSpec,
        *,
        max_prompts: int,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedParts:
        """Pages for the spec's kv_cache_tokens, or as many as the constructor said."""
        self.max_prompts = max_prompts
        self.pages = (spec.kv_cache_tokens or self.pages * PAGE) // PAGE
        for phase in PHASES:
            report(LoadProgress(phase=phase, done=1000, total=1000))
            if cancelled():
                raise LoadCancelled("the load was cancelled")
        return LoadedParts(
            library=library,
            config=None,
            info=self._info(spec),
            pages=self.pages,
            draft_tokens=self.draft_tokens,
            make_generator=self._make_generator,
            free=self._free,
        )

    def _info(self, spec: ModelSpec) -> LoadedModel:
        return LoadedModel(
            backend="exllamav2",
            architecture="FakeForCausalLM",
            dtype="exl2",
            devices=("cuda:0",),
            vocab_size=VOCAB_SIZE,
            max_model_len=spec.max_model_len or self.max_model_len,
            kv_tokens=self.pages * PAGE,
            page_tokens=PAGE,
            weights_bytes=1000,
            kv_bytes=1000,
            parameters=1000,
        )

    def _make_generator(self) -> Any:
        self.faults.strike("make_generator")
        self.generators.append(
            FakeGenerator(
                pages=self.pages,
                max_batch_size=self.places,
                max_chunk_size=self.max_chunk_size,
                vocab_size=VOCAB_SIZE,
                num_draft_tokens=self.draft_tokens,
                use_ngram_draft=self.ngram,
                faults=self.faults,
                logits=self.logits,
            )
        )
        return self.generators[-1]

    def _free(self) -> None:
        self.freed += 1


class RealExllama(FakeExllama):
    """The library's own generator, job and settings, over stubbed kernels (see `exllama_kernels`).

    packed: whether the weights are quantised.  dtype: of the logits.  pinned: makes the memory that they come back to.
    """

    packed = True
    dtype = torch.float32
    pinned: Pinned = staticmethod(pinned_floats)

    def import_library(self, report: Callable[[LoadProgress], None], **load: Any) -> Library:
        """The real classes."""
        real = real_modules()
        return replace(
            super().import_library(report, **load),
            generator=real.dynamic.ExLlamaV2DynamicGenerator,
            job=real.dynamic.ExLlamaV2DynamicJob,
            page_hash=real.dynamic._tensor_hash_checksum,
            settings=real.sampler.ExLlamaV2Sampler.Settings,
        )

    def _make_generator(self) -> Any:
        self.faults.strike("make_generator")
        parts = [self._part(self.logits)]
        if self.draft_tokens and not self.ngram:
            parts.append(self._part(unsure(self.logits)))
        plan = SimpleNamespace(
            library=SimpleNamespace(generator=real_modules().dynamic.ExLlamaV2DynamicGenerator),
            spec=SimpleNamespace(ngram_draft=self.ngram),
            draft_tokens=self.draft_tokens,
            max_prompts=self.max_prompts,
            is_packed=self.packed,
        )
        maker = GeneratorMaker(
            plan,  # type: ignore[arg-type]
            ByteTokenizer(VOCAB_SIZE),
            LoadAllocations(FakeGpus(0), parts),
            self.pinned,
        )
        generator = maker()
        generator.max_batch_size = self.places
        for method in ("iterate", "cancel", "enqueue"):
            setattr(generator, method, self._failing(method, getattr(generator, method)))
        self.generators.append(generator)
        return generator

    def _part(self, logits: Logits) -> ModelAndCache:
        model = TokenModel(
            vocab_size=VOCAB_SIZE,
            max_seq_len=self.max_model_len,
            max_input_len=self.max_chunk_size,
            logits=logits,
            dtype=self.dtype,
        )
        return ModelAndCache(model, PagedTokens(self.pages * PAGE))

    def _failing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any) -> Any:
            self.faults.strike(name)
            return method(*args)

        return struck
