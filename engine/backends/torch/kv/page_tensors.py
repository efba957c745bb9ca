"""The pool of KV pages: keys and values of every layer, addressed by page and by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.model_config import ModelConfig
from engine.backends.torch.huge_pages import advise_huge_pages
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.torch.layout import Layout


class KvPool:
    """Per layer one tensor [pages, page_tokens, 2 * kv_heads, head_dim]: a token's key heads, then its value heads.

    Keys and values of a token lie side by side so that one copy writes both and one gather of whole pages reads
    both. A slot is a token's place: page * page_tokens + offset. A layer's pages lie where its weights do.
    Gathers on a device share one scratch buffer, which grows to the largest: on long contexts, faulting in fresh
    memory would take longer than the gather itself.

    Where native attention computes, pages are as many bytes, which it alone reads and writes; see native/attention.h.

    codec: how heads become codes; a page then holds their bytes instead, [..., head_bytes]. None where heads are plain.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_tokens: int,
        *,
        heads: HeadFormat,
        dtype: torch.dtype,
        layout: Layout,
        report: Callable[[LoadProgress], None],
    ) -> None:
        """Allocate zeroed pages (stale bits could be NaN, which no mask hides), touching them so that the memory is
        really held, and enter them into the devices' accounts. Raises InsufficientMemory with the numbers."""
        self.page_tokens = page_tokens
        devices = [memory.device for memory in layout.memories]
        self.codec = HeadCodec(heads, devices) if heads.coded else None
        kept, size = (torch.uint8, heads.head_bytes) if heads.coded else (dtype, heads.head_dim)
        shape = (num_pages, page_tokens, 2 * config.kv_heads, size)
        layer_bytes = num_pages * page_tokens * 2 * config.kv_heads * heads.head_bytes
        self.total_bytes = layer_bytes * config.layers
        self._scratch = {device: _Scratch(shape[1:], kept, device) for device in devices}
        self._decoded = {device: _Scratch((*shape[1:-1], heads.head_dim), dtype, device) for device in devices}
        self.layers: list[Tensor] = []
        for span in layout.spans:
            span_bytes = layer_bytes * len(span.layers)
            where = "" if len(layout.spans) == 1 else f" for {len(span.layers)} of {config.layers} layers"
            with span.memory.room_for(span_bytes, f"{num_pages} KV pages of {page_tokens} tokens{where}"):
                fresh = _untouched(len(span.layers), shape, kept, span.device)
                for layer, pages in zip(span.layers, fresh, strict=True):
                    self.layers.append(pages.zero_())
                    report(LoadProgress(phase="kv_cache", done=layer_bytes * (layer + 1), total=self.total_bytes))
            span.memory.kv_bytes += span_bytes

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [T, 2 * kv_heads, head_dim] at `slots` [T].

        With a codec they become what `read` will give, turned and rounded: a token that looks at rows of its own step
        sees what it would see in the pages, so that answers do not depend on how a prompt is cut into chunks.
        """
        rows = keys_values
        if self.codec is not None:
            rows = self.codec.encode(keys_values)
            keys_values.copy_(self.codec.decode(rows, torch.empty_like(keys_values)))
        self.layers[layer].flatten(0, 1).index_copy_(0, slots, rows)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages as they lie, two views [pages, page_tokens, kv_heads, head_dim]; plain ones."""
        keys, values = self.layers[layer].chunk(2, dim=2)
        return keys, values

    def read(self, layer: int, pages: Tensor | slice, sequences: int) -> Tensor:
        """Tokens of `pages` (equally many for each of `sequences`, in order): [sequences, tokens, 2 * kv_heads, d].

        What is returned holds until the next `read`, and is to be let go of before it: a slice of adjacent plain pages
        is a view, anything else a copy.
        """
        pool = self.layers[layer]
        if isinstance(pages, slice):
            found = pool[pages]
        else:
            found = torch.index_select(pool, 0, pages, out=self._scratch[pool.device].of(len(pages)))
        if self.codec is not None:
            found = self.codec.decode(found, self._decoded[pool.device].of(len(found)))
        return found.view(sequences, -1, *found.shape[2:])


def _untouched(layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Room for the pages of some layers; in RAM in one piece, so that it is made of huge pages."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
    return advise_huge_pages(torch.empty((layers, *shape), dtype=dtype)).unbind()


class _Scratch:
    """Room for copies of pages, as large as the most that were asked for at once."""

    def __init__(self, page_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pages = torch.empty((0, *page_shape), dtype=dtype, device=device)

    def of(self, count: int) -> Tensor:
        """Room for `count` pages; what was in it is lost."""
        if len(self._pages) < count:
            self._pages = self._pages[:0].clone()  # gives the smaller room back before the larger one is taken
            self._pages = self._pages.new_empty((count, *self._pages.shape[1:]))
        return self._pages[:count]
