"""Keys and values of the sequences that decode, copied side by side and kept from step to step.

Where pages are gathered, a decode would copy all of its pages for every token. Instead a sequence's are copied once,
when it begins to decode, and each step adds its token to the pages and to the copy; the pages stay what is true.
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

# How the room of a mirror is cut into rows, and which of its rows attend in one call. Integers only.

LEAST_ROW_TOKENS = 256

_WORTH = 1.25
"""Cutting the room anew has all rows filled anew: so much more must fit than does."""

_POOL_PART = 4
_FREE_PART = 8


def staging_tokens(*, pool_tokens: int, most_sequences: int, free_bytes: int, bytes_per_token: int) -> int:
    """Tokens that a mirror has room for: a quarter of what the pages hold, as far as an eighth of the memory that they
    left free goes; 0 where that is no row, or no sequence is to be mirrored."""
    tokens = min(pool_tokens // _POOL_PART, free_bytes // _FREE_PART // bytes_per_token)
    return tokens if most_sequences and tokens >= LEAST_ROW_TOKENS else 0


def row_tokens(ends: Sequence[int], room: int, current: int) -> int:
    """Tokens of a row, where sequences that end at `ends` are to share `room` tokens.

    What lets most tokens fit; `current` as long as nothing is much better.
    """
    found = {size: _fitting(ends, room, size) for size in _sizes(room)}
    best = max(found, key=lambda size: (found[size], -size))
    return best if found[best] > _WORTH * found.get(current, 0) else current


def runs(ends: Sequence[int]) -> list[range]:
    """Adjacent rows of these lengths that attend in one call each, so that padding costs less than more calls would."""
    found: list[range] = []
    real = longest = 0
    for row, end in enumerate(ends):
        padded = (len(found[-1]) + 1) * max(longest, end) if found else 0
        if found and padded <= 1.5 * (real + end) + SLACK_PAIRS:
            found[-1] = range(found[-1].start, row + 1)
            real, longest = real + end, max(longest, end)
        else:
            found.append(range(row, row + 1))
            real, longest = end, end
    return found


def _fitting(ends: Sequence[int], room: int, size: int) -> int:
    return sum(itertools.islice((end for end in ends if end <= size), room // size))


def _sizes(room: int) -> Iterator[int]:
    """256, 384, 512, 768, 1024 and on, as far as a row has room."""
    size = LEAST_ROW_TOKENS
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
    """The part of one step that attends over a mirror: the batch's first rows, one for each row of it.

    chunks: numbers of the chunks, in order of the rows.  slots: where the heads of the rows' tokens go.
    copied: tokens of the longest sequence that was copied for it.
    """

    mirror: ContiguousKvStaging
    chunks: Sequence[int]
    slots: Tensor
    runs: tuple[StagingRun, ...]
    copied: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, tokens copied at once, and elements of all masks."""
        return len(self.chunks), self.copied, sum(run.mask.numel() for run in self.runs if run.mask is not None)

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, scale: float) -> list[Tensor]:
        """Attention outputs of the runs, [rows, heads * head_dim] each, of the batch's `queries` [T, heads, d]. Its
        `keys_values` [T, 2 * kv_heads, d] go into the mirror first."""
        kept = self.mirror.rows(layer)
        size = queries.shape[2]
        kept.view(-1, size).index_copy_(0, self.slots, keys_values[: len(self.chunks)].reshape(-1, size))
        keys, values = kept.chunk(2, dim=1)
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
    """Whose copy a row holds, of how many tokens, and how far anything was ever written to it."""

    stay: int = 0
    tokens: int = 0
    written: int = 0


class ContiguousKvStaging:
    """Room for so many tokens, cut into rows [2 * kv_heads, tokens, head_dim] for as many sequences as decode.

    The rows of a step are the first ones and hold nobody else. A row is known by its sequence's stay in the pages, a
    number that no other has and that ends when the pages are given back, and holds what was computed before the chunk:
    so whatever a sequence went through between two steps, its copy is of its own pages, or is made anew. Sequences
    that are longer than a row, or more than there are rows, have their pages gathered.
    """

    def __init__(self, kv: KvPool, tokens: int) -> None:
        """Take and touch the memory: `size_bytes`."""
        self._kv = kv
        _, self._page_tokens, self._heads, self._size = kv.layers[0].shape
        self._room = tokens
        self._memory = torch.empty(
            (len(kv.layers), tokens * self._heads * self._size), dtype=kv.layers[0].dtype, device="cpu"
        )
        advise_huge_pages(self._memory).zero_()  # stale bits could be NaN, which no mask hides
        self._row_tokens = 0
        self._layers: list[Tensor] = []
        self._all: list[_Row] = []
        self._used: list[_Row] = []
        self._cut(LEAST_ROW_TOKENS)

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return self._memory.nbytes

    def rows(self, layer: int) -> Tensor:
        """All rows of a layer: [rows, 2 * kv_heads, tokens, head_dim]."""
        return self._layers[layer]

    def forget(self) -> None:
        """Nothing in it is to be trusted any more."""
        for row in self._used:
            row.stay = row.tokens = 0
        self._used = []

    def step(self, chunks: Sequence[ChunkInput]) -> StagingStep | None:
        """Make it hold those of `chunks` that go on with a single token, as far as they fit; None where none does."""
        wanted = {chunk.stay: index for index, chunk in enumerate(chunks) if chunk.stay and len(chunk.token_ids) == 1}
        if not wanted:
            self.forget()
            return None
        self._cut(row_tokens([chunks[index].end for index in wanted.values()], self._room, self._row_tokens))
        wanted = {stay: index for stay, index in wanted.items() if chunks[index].end <= self._row_tokens}
        self._let_go(wanted.keys())
        held = {row.stay for row in self._used}
        spare = len(self._all) - len(self._used)
        for stay in [stay for stay in wanted if stay not in held][:spare]:
            self._used.append(self._all[len(self._used)])
            self._used[-1].stay, self._used[-1].tokens = stay, -1
        if not self._used:
            return None
        numbers = [wanted[row.stay] for row in self._used]
        copied = 0
        for index, (row, number) in enumerate(zip(self._used, numbers, strict=True)):
            if chunks[number].start > row.tokens:
                self._copy_pages(index, chunks[number])
                copied = max(copied, chunks[number].start)
            row.tokens = chunks[number].end
            row.written = max(row.written, row.tokens)
        return self._planned(numbers, [row.tokens for row in self._used], copied)

    def _planned(self, numbers: Sequence[int], ends: Sequence[int], copied: int) -> StagingStep:
        lengths = torch.tensor(ends)
        first = torch.arange(len(ends)) * (self._heads * self._row_tokens) + lengths - 1
        slots = first[:, None] + torch.arange(self._heads) * self._row_tokens
        found = []
        for run in runs(ends):
            rows = slice(run.start, run.stop)
            tokens = max(ends[rows])
            mask = None
            if min(ends[rows]) < tokens:
                hidden = torch.arange(tokens) >= lengths[rows, None]
                mask = torch.zeros(hidden.shape, dtype=self._memory.dtype).masked_fill_(hidden, -torch.inf)
                mask = mask[:, None, None]
            found.append(StagingRun(rows, tokens, mask))
        return StagingStep(self, numbers, slots.flatten(), tuple(found), copied)

    def _cut(self, tokens: int) -> None:
        """Have rows of so many tokens; where they had others, nothing is held any more."""
        if self._row_tokens == tokens:
            return
        self._row_tokens = tokens
        count = self._room // tokens
        used = count * self._heads * tokens * self._size
        self._layers = [layer[:used].view(count, self._heads, tokens, self._size) for layer in self._memory.unbind()]
        self._all = [_Row(written=tokens) for _ in range(count)]
        self._used = []

    def _let_go(self, stays: Iterable[int]) -> None:
        """Keep the rows of these alone, the last ones in place of those that go."""
        kept = set(stays)
        for index in reversed(range(len(self._used))):
            if self._used[index].stay in kept:
                continue
            last = self._used.pop()
            if index < len(self._used):
                row = self._used[index]
                for layer in self._layers:
                    layer[index, :, : last.tokens] = layer[len(self._used), :, : last.tokens]
                    layer[index, :, last.tokens : row.written].zero_()
                row.stay, row.tokens, row.written = last.stay, last.tokens, last.tokens
            last.stay = last.tokens = 0

    def _copy_pages(self, index: int, chunk: ChunkInput) -> None:
        """Fill a row with what is computed of a sequence, and what an earlier one left behind with zeros: a mask would
        not hide its NaN."""
        pages = torch.tensor(chunk.pages[: -(-chunk.start // self._page_tokens)])
        row = self._all[index]
        for layer, rows in enumerate(self._layers):
            if chunk.start:
                found = self._kv.read(layer, pages, 1)[0, : chunk.start]
                rows[index, :, : chunk.start] = found.transpose(0, 1)
            rows[index, :, chunk.start : row.written].zero_()
        row.written = chunk.start


def kv_staging_for(kv: KvPool, config: ModelConfig, layout: Layout, most_sequences: int) -> ContiguousKvStaging | None:
    """A mirror of what lies in `kv` for up to so many sequences, part of what each step takes on the one device that it
    is for: RAM, where all layers see all tokens and scores are plain. None elsewhere, and where there is no room."""
    home = layout.first
    plain = kv.codec is None and not config.traits.score_cap and config.traits.windows == (None,) * config.layers
    if not plain or len(layout.spans) > 1 or home.simulated or home.device.type != "cpu":
        return None
    pages = kv.layers[0]
    tokens = staging_tokens(
        pool_tokens=pages.shape[0] * pages.shape[1],
        most_sequences=most_sequences,
        free_bytes=home.free_bytes(),
        bytes_per_token=kv.total_bytes // (pages.shape[0] * pages.shape[1]),
    )
    if not tokens:
        return None
    return ContiguousKvStaging(kv, tokens)
