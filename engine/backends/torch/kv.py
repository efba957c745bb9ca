"""The pool of KV pages: keys and values of every layer, addressed by page and by slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.torch.layout import Layout
from engine.backends.torch.model_config import ModelConfig


class KvPool:
    """Per layer one tensor [pages, page_tokens, 2 * kv_heads, head_dim]: a token's key heads, then its value heads.

    Keys and values of a token lie side by side so that one copy writes both and one gather of whole pages reads
    both. A slot is a token's place: page * page_tokens + offset. A layer's pages lie where its weights do.
    Gathers on a device share one scratch buffer, which grows to the largest: on long contexts, faulting in fresh
    memory would take longer than the gather itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        layout: Layout,
        report: Callable[[LoadProgress], None],
    ) -> None:
        """Allocate zeroed pages (stale bits could be NaN, which no mask hides), touching them so that the memory is
        really held, and enter them into the devices' accounts. Raises InsufficientMemory with the numbers."""
        self.page_tokens = page_tokens
        shape = (num_pages, page_tokens, 2 * config.kv_heads, config.head_dim)
        layer_bytes = num_pages * page_tokens * 2 * config.kv_heads * config.head_dim * dtype.itemsize
        self.total_bytes = layer_bytes * config.layers
        self._scratch = {
            memory.device: torch.empty((0, *shape[1:]), dtype=dtype, device=memory.device) for memory in layout.memories
        }
        self.layers: list[Tensor] = []
        for span in layout.spans:
            span_bytes = layer_bytes * len(span.layers)
            where = "" if len(layout.spans) == 1 else f" for {len(span.layers)} of {config.layers} layers"
            with span.memory.room_for(span_bytes, f"{num_pages} KV pages of {page_tokens} tokens{where}"):
                for layer in span.layers:
                    self.layers.append(torch.empty(shape, dtype=dtype, device=span.device).zero_())
                    report(LoadProgress(phase="kv_cache", done=layer_bytes * (layer + 1), total=self.total_bytes))
            span.memory.kv_bytes += span_bytes

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [T, 2 * kv_heads, head_dim] at `slots` [T]."""
        self.layers[layer].flatten(0, 1).index_copy_(0, slots, keys_values)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages as they lie, two views [pages, page_tokens, kv_heads, head_dim]."""
        keys, values = self.layers[layer].chunk(2, dim=2)
        return keys, values

    def read(self, layer: int, pages: Tensor | slice, sequences: int) -> Tensor:
        """Tokens of `pages` (equally many for each of `sequences`, in order): [sequences, tokens, 2 * kv_heads, d].

        What is returned holds until the next `read`: a slice of adjacent pages is a view, anything else a gather.
        """
        pool = self.layers[layer]
        found = pool[pages] if isinstance(pages, slice) else self._gather(pool, pages)
        return found.view(sequences, -1, *pool.shape[2:])

    def _gather(self, pool: Tensor, pages: Tensor) -> Tensor:
        scratch = self._scratch[pool.device]
        if len(scratch) < len(pages):
            scratch = torch.empty((len(pages), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
            self._scratch[pool.device] = scratch
        return torch.index_select(pool, 0, pages, out=scratch[: len(pages)])
