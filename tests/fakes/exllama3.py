"""The real exllamav3 package on a CPU, its kernels stubbed: what an Exllama3Backend under test is made with.

Its own Generator, Job, PageTable and prefix cache are run, over a model that reads its tokens back from the pages that
it was told to write them to, so that a page table that goes wrong gives other tokens.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from engine.backends.base import LoadedModel, LoadProgress
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllama.load import ModelAndCache
from engine.backends.exllamav3.backend import Exllama3Backend
from engine.backends.exllamav3.library import PACKAGE, Library, library_of_modules
from engine.backends.exllamav3.loading import GeneratorMaker, LoadAllocations
from engine.config import ModelSpec
from engine.errors import LoadCancelled
from tests.fakes.exllama import PHASES, unsure
from tests.fakes.exllama_generator import PADDED_TO, Faults, Logits, hash_logits
from tests.fakes.exllama_kernels import count_match
from tests.fakes.exllama_model import FakeGpus
from tests.fakes.model import VOCAB_SIZE
from tests.fakes.published_sources import EXLLAMAV3, source_folder

PAGE = 256
_OPTIONAL = ("marisa_trie", "PIL")
"""Packages that the library imports for what is not tested."""


@cache
def real_library() -> SimpleNamespace:
    """The library's classes as `library`, its module `generator`, and all of its `modules` by name."""
    found = SimpleNamespace(modules=stubs())
    with importable(found.modules):
        PACKAGE.load_modules()
        found.library = library_of_modules()
        found.generator = importlib.import_module(f"{PACKAGE.name}.generator.generator")
    found.generator.torch = Unpinned()
    return found


@contextmanager
def importable(modules: dict[str, ModuleType] | None = None) -> Iterator[None]:
    """Let the library be imported, by itself too, which it does at some calls. It does not stay: other tests look for
    it. modules: what has been imported of it, to which this adds."""
    modules = real_library().modules if modules is None else modules
    folder = str(source_folder(EXLLAMAV3))
    sys.path.insert(0, folder)
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name or name in modules]:
            modules[name] = sys.modules.pop(name)


def stubs() -> dict[str, ModuleType]:
    """What stands in for the compiled module, and for packages that are not here, by name."""
    found: dict[str, ModuleType] = {name: Unused(name) for name in _OPTIONAL if importlib.util.find_spec(name) is None}
    found[PACKAGE.extension] = Kernels(PACKAGE.extension)
    return found


class Unused(ModuleType):
    """A module with anything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Kernels(ModuleType):
    """The compiled module: those of its functions that a generator calls; the others cannot be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, object(), origin=f"{name}.so")  # type: ignore[arg-type]
        self.count_match_tensor = count_match
        self.generator_stage_decode = stage_decode
        self.BC_SAM = SuffixAutomaton

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class SuffixAutomaton:
    """Where the end of a text came before in it."""

    def accept_tensor(self, tokens: Tensor) -> tuple[int, int]:
        """Start and end of the earlier occurrence of the longest suffix of ids [1, tokens]; (0, 0) for none."""
        ids = tokens[0].tolist()
        for length in range(min(len(ids) - 1, 32), 0, -1):
            for start in range(len(ids) - length - 1, -1, -1):
                if ids[start : start + length] == ids[-length:]:
                    return start, start + length
        return 0, 0


class Unpinned:
    """`torch` without pinned memory and CUDA, which a machine without a GPU does not have."""

    cuda = SimpleNamespace(synchronize=lambda device: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """Not pinned."""
        return torch.empty(*shape, **options)

    def zeros(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """Not pinned."""
        return torch.zeros(*shape, **options)


def stage_decode(
    arena: Tensor,
    width: int,
    tables: Sequence[Tensor],
    lengths: Sequence[int],
    offsets: Sequence[int],
    ids: Tensor | None,
    sequence_ids: Sequence[Tensor],
    pages: Sequence[Tensor],
    page_lengths: Sequence[int],
) -> None:
    """Fill a step's block tables and lengths, and note its input tokens in their pages."""
    rows = len(tables)
    blocks = arena[: rows * width].view(rows, width).zero_()
    for row, table in enumerate(tables):
        used = min(width, table.shape[-1])
        blocks[row, :used] = table[0, :used]
        arena[rows * width + row] = lengths[row]
        if ids is not None:
            token = sequence_ids[row][0, lengths[row]]
            ids[row, 0] = token
            pages[row][0, page_lengths[row]] = token


class PagedTokens:
    """A cache whose "keys and values" are the token ids themselves: int64 [pages, tokens of a page]."""

    initialized = True

    def __init__(self, pages: int) -> None:
        self.max_num_tokens = pages * PAGE
        self.ids = torch.full((pages, PAGE), -1)
        self.model = SimpleNamespace(loaded_tp=False)

    def get_all_tensors(self) -> list[Tensor]:
        """What the generator moves when it tidies pages up."""
        return [self.ids]

    def copy_page(self, target: PagedTokens, from_page: int, to_page: int, num_tokens: int) -> None:
        """Copy the first tokens of a page."""
        target.ids[to_page, :num_tokens] = self.ids[from_page, :num_tokens]


class TokenModel:
    """A model that appends token ids to pages, and answers with the hash of all that the pages then hold.

    forwarded: sequences and tokens of each step that gave logits.
    """

    loaded_tp = False

    def __init__(self, vocab_size: int, logits: Logits) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, infer_params=SimpleNamespace())
        self.caps: dict[str, Any] = {}
        self.output_device = torch.device("cpu")
        self.logits = logits
        self.forwarded: list[tuple[int, int]] = []
        self.draft_verifier_params: dict[str, Any] = {}

    def get_cache_layers(self) -> list[Any]:
        """None lies on a GPU."""
        return []

    def prefetch_tokens(self, ids: list[int]) -> None:
        """Nothing."""

    def prefill(self, input_ids: Tensor, params: dict[str, Any]) -> None:
        """Put ids [1, tokens] into the pages."""
        self._place(input_ids, params)

    def forward(self, *, input_ids: Tensor, params: dict[str, Any]) -> Tensor:
        """Half-precision logits [sequences, tokens, padded vocab] for ids [sequences, tokens]."""
        self.forwarded.append((input_ids.shape[0], input_ids.shape[1]))
        vocab_size = self.config.vocab_size
        rows = self._place(input_ids, params)
        logits = torch.full((*input_ids.shape, -(-vocab_size // PADDED_TO) * PADDED_TO), 60.0)
        for row, known in enumerate(rows):
            for column in range(input_ids.shape[1]):
                upto = len(known) - input_ids.shape[1] + column + 1
                logits[row, column, :vocab_size] = self.logits(known[:upto], vocab_size)
        return logits

    def unload(self) -> None:
        """Nothing to free."""

    def _place(self, input_ids: Tensor, params: dict[str, Any]) -> list[list[int]]:
        """What each sequence's pages hold then."""
        held, cache = [], params["cache"]
        for ids, start, blocks in zip(input_ids, params["cache_seqlens"], params["block_table"], strict=True):
            end = int(start) + len(ids)
            places = [(int(blocks[place // PAGE]), place % PAGE) for place in range(end)]
            for place, token in zip(places[int(start) :], ids.tolist(), strict=True):
                cache.ids[place] = token
            held.append([int(cache.ids[place]) for place in places])
        return held


class RealExllama3:
    """The library with its own generator over a stubbed model, and a loader.

    generators: those made so far, the last one in use.   freed: how often the memory was given back.
    faults: errors to come, also from "make_generator".   logits: what the model says.
    """

    def __init__(
        self,
        *,
        pages: int = 16,
        max_model_len: int = 2048,
        draft_tokens: int = 0,
        ngram: bool = False,
        logits: Logits = hash_logits,
    ) -> None:
        self.pages = pages
        self.max_model_len = max_model_len
        self.draft_tokens = draft_tokens
        self.ngram = ngram
        self.logits = logits
        self.faults = Faults()
        self.generators: list[Any] = []
        self.freed = 0

    def backend(self) -> Exllama3Backend:
        """A backend over these, with nothing loaded."""
        return Exllama3Backend(self.import_library, self.load_parts)

    def import_library(
        self, report: Callable[[LoadProgress], None], *, spec: ModelSpec, cancelled: Callable[[], bool]
    ) -> Library:
        """The real classes."""
        library: Library = real_library().library
        return library

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
        self.pages = (spec.kv_cache_tokens or self.pages * PAGE) // PAGE
        for phase in PHASES:
            report(LoadProgress(phase=phase, done=1000, total=1000))
            if cancelled():
                raise LoadCancelled("the load was cancelled")
        models = [ModelAndCache(TokenModel(VOCAB_SIZE, self.logits), PagedTokens(self.pages))]
        if self.draft_tokens and not self.ngram:
            models.append(ModelAndCache(TokenModel(VOCAB_SIZE, unsure(self.logits)), PagedTokens(self.pages)))
        allocations = LoadAllocations(FakeGpus(), models)
        maker = GeneratorMaker(library, allocations, VOCAB_SIZE, chunk_tokens=512, draft_tokens=self.draft_tokens)

        def free() -> None:
            self.freed += 1
            allocations.free()

        return LoadedParts(
            library=library,
            config=None,
            info=LoadedModel(
                backend="exllamav3",
                architecture="FakeForCausalLM",
                dtype="exl3",
                devices=("cuda:0",),
                vocab_size=VOCAB_SIZE,
                max_model_len=spec.max_model_len or self.max_model_len,
                kv_tokens=self.pages * PAGE,
                page_tokens=PAGE,
                weights_bytes=1000,
                kv_bytes=1000,
                parameters=1000,
            ),
            pages=self.pages,
            draft_tokens=self.draft_tokens,
            make_generator=lambda: self._make_generator(maker),
            free=free,
        )

    def _make_generator(self, maker: GeneratorMaker) -> Any:
        self.faults.strike("make_generator")
        generator = maker()
        for method in ("iterate", "cancel", "enqueue"):
            setattr(generator, method, self._failing(method, getattr(generator, method)))
        self.generators.append(generator)
        return generator

    def _failing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*args: Any) -> Any:
            self.faults.strike(name)
            with importable():
                return method(*args)

        return struck
