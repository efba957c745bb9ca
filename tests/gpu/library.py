"""The library itself, imported as the product does, with its generator made by hand: what ours is measured against. Its
part of a run compiles its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from engine.backends.base import LoadProgress
from engine.backends.exllamav2.library import Library, import_library
from tests.gpu.place import Place
from tests.gpu.report import Row, promise

CHUNK_TOKENS = 2048
ROWS_PER_SEQUENCE = 8

AttentionKind = Literal["flash", "ours", "own"]
"""flash: flash-attn, with which the library batches.  ours: put in its place as in the product, which takes flash-attn
where it fits.  own: that of the library without flash-attn, for one request at a time."""


def imported(report: Callable[[LoadProgress], None] = lambda progress: None) -> Library:
    """The library's classes; kernels are compiled where they are not there yet."""
    return import_library(report)


def config_of(library: Library, folder: Path, max_seq_len: int) -> Any:
    """The library's config of the model in `folder`, its buffers as large as the product makes them."""
    config = library.config()
    config.model_dir = str(folder)
    config.prepare()
    config.no_flash_attn, config.no_xformers, config.no_sdpa = False, True, True
    config.max_seq_len = max_seq_len
    config.max_input_len = min(CHUNK_TOKENS, max_seq_len)
    config.max_attention_size = config.max_input_len**2
    config.max_output_len = 2 * ROWS_PER_SEQUENCE
    return config


def with_attention(library: Library, config: Any, kind: AttentionKind) -> Library:
    """The library with an attention for the model of `config`. Raises InvalidRequest where flash-attn does not fit."""
    if kind == "own" or library.engage is None:
        return replace(library, attention="matrix products of the library")
    return library.engage(config, "auto" if kind == "ours" else "flash", (0,))


def loaded_model(library: Library, config: Any) -> Any:
    """The model with its weights on the first GPU, and no cache."""
    model = library.model(config)
    model.load()
    return model


def generator_over(library: Library, config: Any, cache_tokens: int, kind: AttentionKind) -> Any:
    """A dynamic generator over a model with a 16-bit cache, with the sizes that the product gives it; for one request
    at a time where it has only the library's own attention, which knows no pages."""
    model = loaded_model(library, config)
    paged = kind != "own"
    cache_tokens = cache_tokens if paged else config.max_seq_len
    cache = library.caches[16](model, batch_size=1, max_seq_len=cache_tokens)
    return library.generator(
        model=model,
        cache=cache,
        tokenizer=library.tokenizer(config),
        max_batch_size=config.max_input_len // ROWS_PER_SEQUENCE if paged else 1,
        max_chunk_size=config.max_input_len,
        paged=paged,
        max_q_size=ROWS_PER_SEQUENCE,
    )


def checks(place: Place) -> Iterable[Row]:
    """One row. A compilation says in this part's log how far it is."""
    told: list[LoadProgress] = []

    def report(progress: LoadProgress) -> None:
        told.append(progress)
        print(f"kernels: {progress.done} of {progress.total} files", flush=True)

    started = time.perf_counter()
    imported(report)
    seconds = time.perf_counter() - started
    how = f"{told[-1].total} files compiled" if told else "nothing had to be compiled"
    yield promise("import exllamav2", True, how, value=seconds, unit="s")
