"""The library's classes, and a loaded model: the two values that the rest of this backend works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.base import LoadedModel
from engine.config import AttentionName

MAX_Q_SIZE = 8
"""Rows of the library's decode buffer per sequence: a step with drafts holds at most one less of them."""


@dataclass(frozen=True, slots=True)
class Library:
    """The library's classes, imported. The fields are named after what they are, not after the library's names.

    page_hash: how pages of the cache are known (see `cache_scope`).
    caches: by bits per element (16, 8, 6, 4).  cache_tp: wraps one of them for tensor parallelism.
    attention, attention_reason: as in LoadedModel.
    engage: (config, wanted attention, GPU numbers) -> this library, computing with the attention that fits them; None
        where the attention is settled.
    """

    config: Any
    model: Any
    caches: dict[int, Any]
    cache_tp: Any
    tokenizer: Any
    generator: Any
    job: Any
    page_hash: Any
    settings: Any
    lora: Any
    attention: str
    attention_reason: str
    engage: Callable[[Any, AttentionName, Sequence[int]], Library] | None = None


@dataclass(slots=True)
class LoadedParts:
    """A loaded model with its cache, ready to generate.

    make_generator: a new generator over the same weights and an emptied page table; how a broken one is mended.
    draft_tokens: tokens guessed ahead per step, 0 without speculation.  free: gives all memory back; idempotent.
    """

    library: Library
    config: Any
    tokenizer: Any
    info: LoadedModel
    pages: int
    draft_tokens: int
    make_generator: Callable[[], Any]
    free: Callable[[], None]
