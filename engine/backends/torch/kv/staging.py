"""ContiguousKvStaging: contiguous copies of the KV pages of decoding sequences, updated from step to step.

Where attention gathers pages, a decode would copy all of its pages for every token. Instead they are copied once, when
the sequence begins to decode, and each step adds its token to both the pages and the copy. The pages remain
authoritative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.model_config import ModelConfig
from engine.backends.common.step_memory import SLACK_PAIRS
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.huge_pages import advise_huge_pages
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.layout import Layout

# Sizes of rows, and which rows attend in one call. Integers only.

MIN_ROW_TOKENS = 256

_RESIZE_GAIN = 1.25
"""Factor by which more tokens must fit for a new row size, as all rows are copied again."""

_POOL_DIVISOR = 4
_FREE_DIVISOR = 8


def staging_tokens(*, pool_tokens: int, max_sequences: int, free_bytes: int, bytes_per_token: int) -> int:
    """Return the capacity of a staging: a quarter of the pages' tokens, within an eighth of the remaining free memory;
    0 where that is less than a row, or `max_sequences` is 0."""
    tokens = min(pool_tokens // _POOL_DIVISOR, free_bytes // _FREE_DIVISOR // bytes_per_token)
    return tokens if max_sequences and tokens >= MIN_ROW_TOKENS else 0


def row_tokens(ends: Sequence[int], room: int, current: int) -> int:
    """Return the row size with which most tokens of sequences that end at `ends` fit into `room` tokens; `current`
    unless another is much better."""
    fitting = {size: _fitting_tokens(ends, room, size) for size in _row_sizes(room)}
    best = max(fitting, key=lambda size: (fitting[size], -size))
    return best if fitting[best] > _RESIZE_GAIN * fitting.get(current, 0) else current


def group_rows(ends: Sequence[int]) -> list[range]:
    """Group adjacent rows of these lengths into calls where padding costs less than more calls would."""
    groups: list[range] = []
    real = longest = 0
    for row, end in enumerate(ends):
        padded = (len(groups[-1]) + 1) * max(longest, end) if groups else 0
        if groups and padded <= 1.5 * (real + end) + SLACK_PAIRS:
            groups[-1] = range(groups[-1].start, row + 1)
            real, longest = real + end, max(longest, end)
        else:
            groups.append(range(row, row + 1))
            real, longest = end, end
    return groups


def _fitting_tokens(ends: Sequence[int], room: int, size: int) -> int:
    return sum(itertools.islice((end for end in ends if end <= size), room // size))


def _row_sizes(room: int) -> Iterator[int]:
    """Yield 256, 384, 512, 768, 1024 and so on, up to `room`."""
    size = MIN_ROW_TOKENS
    while size <= room:
        yield size
        if 3 * size // 2 <= room:
            yield 3 * size // 2
        size *= 2


@dataclass(frozen=True, slots=True)
class StagingRun:
    """Adjacent rows that attend in one call over their first `tokens`. mask: [rows, 1, 1, tokens], None where all are
    equally long."""

    rows: slice
    tokens: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class StagingStep:
    """The part of a step that attends over the staging: the batch's first rows, one per staging row.

    chunks: indices of the chunks, in order of the rows.  slots: destinations of the heads of the rows' tokens.
    copied: tokens of the longest sequence that was copied for this step.
    """

    staging: ContiguousKvStaging
    chunks: Sequence[int]
    slots: Tensor
    runs: tuple[StagingRun, ...]
    copied: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of rows, of tokens copied at once, and of elements of all masks."""
        return len(self.chunks), self.copied, sum(run.mask.numel() for run in self.runs if run.mask is not None)

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, scale: float) -> list[Tensor]:
        """Return the attention outputs of the runs, [rows, heads * head_dim] each, for the batch's `queries`
        [T, heads, d], after storing its `keys_values` [T, 2 * kv_heads, d] in the staging."""
        staged = self.staging.rows(layer)
        size = queries.shape[2]
        staged.view(-1, size).index_copy_(0, self.slots, keys_values[: len(self.chunks)].reshape(-1, size))
        keys, values = staged.chunk(2, dim=1)
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        return [
            F.scaled_dot_product_attention(
                grouped[run.rows],
                keys[run.rows, :, : run.tokens],
                values[run.rows, :, : run.tokens],
                attn_mask=run.mask,
                scale=scale,
            ).flatten(1)
            for run in self.runs
        ]


@dataclass(slots=True)
class _Row:
    """Contents of a row: the sequence's residency, its tokens, and the end of all that was written."""

    residency: int = 0
    tokens: int = 0
    written: int = 0


class ContiguousKvStaging:
    """Memory for `tokens` tokens, split into rows [2 * kv_heads, tokens, head_dim], one per decoding sequence.

    A step uses the first rows, and no others are occupied. A row is identified by `ChunkInput.residency`, which changes
    when a sequence loses its pages, and contains what was computed before the chunk: so whatever happens to a sequence
    between two steps, its copy is of its current pages, or is made again. Sequences that are longer than a row, or for
    which there is no row, have their pages gathered.
    """

    def __init__(self, kv: KvPool, tokens: int) -> None:
        """Allocate and touch the memory, `size_bytes`."""
        self._kv = kv
        _, self._page_tokens, self._heads, self._size = kv.layers[0].shape
        self._room = tokens
        self._memory = torch.empty(
            (len(kv.layers), tokens * self._heads * self._size), dtype=kv.layers[0].dtype, device="cpu"
        )
        advise_huge_pages(self._memory).zero_()  # stale bits could be NaN, which no mask hides
        self._row_tokens = 0
        self._layers: list[Tensor] = []
        self._rows: list[_Row] = []
        self._used_rows: list[_Row] = []
        self._resize_rows(MIN_ROW_TOKENS)

    @property
    def size_bytes(self) -> int:
        """Size of the memory."""
        return self._memory.nbytes

    def rows(self, layer: int) -> Tensor:
        """Return all rows of a layer: [rows, 2 * kv_heads, tokens, head_dim]."""
        return self._layers[layer]

    def forget(self) -> None:
        """Invalidate all rows."""
        for row in self._used_rows:
            row.residency = row.tokens = 0
        self._used_rows = []

    def step(self, chunks: Sequence[ChunkInput]) -> StagingStep | None:
        """Stage the decodes among `chunks`, as far as they fit; None where none does."""
        wanted = {
            chunk.residency: index
            for index, chunk in enumerate(chunks)
            if chunk.residency and len(chunk.token_ids) == 1
        }
        if not wanted:
            self.forget()
            return None
        self._resize_rows(row_tokens([chunks[index].end for index in wanted.values()], self._room, self._row_tokens))
        wanted = {residency: index for residency, index in wanted.items() if chunks[index].end <= self._row_tokens}
        self._keep_only(wanted.keys())
        resident = {row.residency for row in self._used_rows}
        spare = len(self._rows) - len(self._used_rows)
        for residency in [residency for residency in wanted if residency not in resident][:spare]:
            self._used_rows.append(self._rows[len(self._used_rows)])
            self._used_rows[-1].residency, self._used_rows[-1].tokens = residency, -1
        if not self._used_rows:
            return None
        chunk_indices = [wanted[row.residency] for row in self._used_rows]
        copied = 0
        for index, (row, chunk_index) in enumerate(zip(self._used_rows, chunk_indices, strict=True)):
            if chunks[chunk_index].start > row.tokens:
                self._copy_pages(index, chunks[chunk_index])
                copied = max(copied, chunks[chunk_index].start)
            row.tokens = chunks[chunk_index].end
            row.written = max(row.written, row.tokens)
        return self._plan(chunk_indices, [row.tokens for row in self._used_rows], copied)

    def _plan(self, chunk_indices: Sequence[int], ends: Sequence[int], copied: int) -> StagingStep:
        lengths = torch.tensor(ends)
        first = torch.arange(len(ends)) * (self._heads * self._row_tokens) + lengths - 1
        slots = first[:, None] + torch.arange(self._heads) * self._row_tokens
        runs: list[StagingRun] = []
        for run in group_rows(ends):
            rows = slice(run.start, run.stop)
            tokens = max(ends[rows])
            mask = None
            if min(ends[rows]) < tokens:
                hidden = torch.arange(tokens) >= lengths[rows, None]
                mask = torch.zeros(hidden.shape, dtype=self._memory.dtype).masked_fill_(hidden, -torch.inf)
                mask = mask[:, None, None]
            runs.append(StagingRun(rows, tokens, mask))
        return StagingStep(self, chunk_indices, slots.flatten(), tuple(runs), copied)

    def _resize_rows(self, tokens: int) -> None:
        """Set the row size; a new one invalidates all rows."""
        if self._row_tokens == tokens:
            return
        self._row_tokens = tokens
        count = self._room // tokens
        used = count * self._heads * tokens * self._size
        self._layers = [layer[:used].view(count, self._heads, tokens, self._size) for layer in self._memory.unbind()]
        self._rows = [_Row(written=tokens) for _ in range(count)]
        self._used_rows = []

    def _keep_only(self, residencies: Iterable[int]) -> None:
        """Keep only these sequences' rows; the last ones replace those that are dropped."""
        kept_ids = set(residencies)
        for index in reversed(range(len(self._used_rows))):
            if self._used_rows[index].residency in kept_ids:
                continue
            last = self._used_rows.pop()
            if index < len(self._used_rows):
                row = self._used_rows[index]
                for layer in self._layers:
                    layer[index, :, : last.tokens] = layer[len(self._used_rows), :, : last.tokens]
                    layer[index, :, last.tokens : row.written].zero_()
                row.residency, row.tokens, row.written = last.residency, last.tokens, last.tokens
            last.residency = last.tokens = 0

    def _copy_pages(self, index: int, chunk: ChunkInput) -> None:
        """Copy a sequence's computed tokens to a row, and zero what an earlier one left there: masks do not hide
        NaN."""
        pages = torch.tensor(chunk.pages[: -(-chunk.start // self._page_tokens)])
        row = self._rows[index]
        for layer, rows in enumerate(self._layers):
            if chunk.start:
                gathered = self._kv.read(layer, pages, 1)[0, : chunk.start]
                rows[index, :, : chunk.start] = gathered.transpose(0, 1)
            rows[index, :, chunk.start : row.written].zero_()
        row.written = chunk.start


def kv_staging_for(kv: KvPool, config: ModelConfig, layout: Layout, max_sequences: int) -> ContiguousKvStaging | None:
    """Return a staging of `kv` for up to `max_sequences`; None unless all is in RAM, without windows, KV codes or
    softcap, and memory suffices."""
    memory = layout.first
    plain = kv.codec is None and not config.traits.attn_softcap and config.traits.windows == (None,) * config.layers
    if not plain or len(layout.spans) > 1 or memory.simulated or memory.device.type != "cpu":
        return None
    pages = kv.layers[0]
    tokens = staging_tokens(
        pool_tokens=pages.shape[0] * pages.shape[1],
        max_sequences=max_sequences,
        free_bytes=memory.free_bytes(),
        bytes_per_token=kv.total_bytes // (pages.shape[0] * pages.shape[1]),
    )
    if not tokens:
        return None
    return ContiguousKvStaging(kv, tokens)
