"""Chunks that attend together over gathered pages: their padding, the keys that they look at, and the masks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.torch.batch import ChunkInput


@dataclass(frozen=True, slots=True)
class KeyView:
    """The keys that a group's queries look at, for one window.

    pages: page ids, equally many per sequence, or a slice where one sequence's pages are adjacent.
    skip, tokens: which of those pages' tokens are used.  own_rows: the keys are the group's own rows, no pages.
    mask: added to the scores, or None.  causal: the plain triangle instead of a mask.
    stale: [n] which tokens of all that the pages give lie behind their sequence's last; None where none does.
    """

    pages: Tensor | slice
    skip: int
    tokens: int
    mask: Tensor | None
    own_rows: bool = False
    causal: bool = False
    stale: Tensor | None = None

    def copied_pages(self, copies_runs: bool) -> int:
        """How many pages are copied to be read; a run of adjacent ones only where `copies_runs`."""
        if isinstance(self.pages, Tensor):
            return len(self.pages)
        return len(range(self.pages.stop)[self.pages]) if copies_runs and not self.own_rows else 0


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Chunks that attend in one call: adjacent rows of the batch.

    width: query rows per sequence, padding included.  pad_rows: rows to take so that each sequence has `width`;
    real_rows: which of the padded rows to keep. Both None where all chunks are equally long.
    views: per window of the model.
    """

    first_row: int
    end_row: int
    sequences: int
    width: int
    pad_rows: Tensor | None
    real_rows: Tensor | None
    views: dict[int | None, KeyView]


class GroupPlanner:
    """Plans how groups attend. What it is made with is StepPlanner's."""

    def __init__(
        self,
        windows: frozenset[int | None],
        shared: int,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        masks: bool,
    ) -> None:
        self._windows, self._shared, self._page_tokens = windows, shared, page_tokens
        self._dtype, self._device, self._masks = dtype, device, masks

    def group(self, members: Sequence[ChunkInput], first_row: int) -> QueryGroup:
        """These chunks, the first of whose rows is `first_row` of the batch."""
        lengths = [len(chunk.token_ids) for chunk in members]
        width, total = max(lengths), sum(lengths)
        pad_rows = real_rows = None
        if min(lengths) != width:
            starts = [0, *itertools.accumulate(lengths)][:-1]
            pad_rows = [s + min(i, n - 1) for s, n in zip(starts, lengths, strict=True) for i in range(width)]
            real_rows = [index * width + i for index, n in enumerate(lengths) for i in range(n)]
        return QueryGroup(
            first_row=first_row,
            end_row=first_row + total,
            sequences=len(members),
            width=width,
            pad_rows=None if pad_rows is None else self._tensor(pad_rows),
            real_rows=None if real_rows is None else self._tensor(real_rows),
            views={window: self._view(members, width, window) for window in self._windows},
        )

    def _view(self, members: Sequence[ChunkInput], width: int, window: int | None) -> KeyView:
        longest = max(chunk.end for chunk in members)
        clipped = window is not None and longest > window
        if len(members) == 1 and members[0].start == 0 and width > 1:
            mask = self._mask(members, width, width, [0], window) if clipped or self._masks else None
            return KeyView(slice(0), 0, width, mask, own_rows=True, causal=mask is None)
        first_pages = [_first_page(chunk, window, self._page_tokens) for chunk in members]
        bases = [page * self._page_tokens for page in first_pages]
        tokens = max(chunk.end - base for chunk, base in zip(members, bases, strict=True))
        skip = 0
        if len(members) == 1 and window is not None:
            skip = max(0, members[0].start - window + 1 - bases[0])
            tokens, bases = tokens - skip, [bases[0] + skip]
        all_seen = width == 1 and all(
            chunk.end - base == tokens and (window is None or tokens <= window)
            for chunk, base in zip(members, bases, strict=True)
        )
        mask = None if all_seen else self._mask(members, width, tokens, bases, window)
        lengths = [chunk.end - base for chunk, base in zip(members, bases, strict=True)]
        return KeyView(
            self._pages(members, first_pages, skip + tokens), skip, tokens, mask, stale=self._stale(lengths, tokens)
        )

    def _pages(self, members: Sequence[ChunkInput], first_pages: Sequence[int], tokens: int) -> Tensor | slice:
        """Page ids that cover `tokens` tokens of each member; a shorter one repeats its own last page."""
        count = -(-tokens // self._page_tokens)
        rows = [chunk.pages[first : first + count] for chunk, first in zip(members, first_pages, strict=True)]
        if len(rows) == 1 and list(rows[0]) == list(range(rows[0][0], rows[0][0] + count)):
            return slice(rows[0][0], rows[0][0] + count)
        return self._tensor([page for row in rows for page in (*row, *[row[-1]] * (count - len(row)))])

    def _stale(self, lengths: Sequence[int], tokens: int) -> Tensor | None:
        """Which of `tokens` tokens of each sequence, read as whole pages, are behind its own `lengths`."""
        stride = -(-tokens // self._page_tokens) * self._page_tokens
        found = [
            torch.arange(index * stride + length, index * stride + tokens)
            for index, length in enumerate(lengths)
            if length < tokens
        ]
        return torch.cat(found).to(self._device) if found else None

    def _mask(
        self, members: Sequence[ChunkInput], width: int, tokens: int, bases: Sequence[int], window: int | None
    ) -> Tensor:
        """What to add to the scores: 0 where a query sees a key, else -inf.

        [width, tokens] for one long chunk, else [B, 1, shared * width, tokens]. Padding queries copy a real one.
        """
        starts, ends = (torch.tensor([getattr(chunk, name) for chunk in members]) for name in ("start", "end"))
        queries = torch.minimum(starts[:, None] + torch.arange(width), ends[:, None] - 1)[:, :, None]
        keys = (torch.tensor(bases)[:, None] + torch.arange(tokens))[:, None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        if len(members) > 1 or width == 1:
            mask = mask[:, None].expand(-1, self._shared, -1, -1).reshape(len(members), 1, -1, tokens)
        else:
            mask = mask[0]
        return mask.to(self._device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _first_page(chunk: ChunkInput, window: int | None, page_tokens: int) -> int:
    """Index of the page that holds the first token seen by the chunk's first query."""
    return 0 if window is None else max(0, chunk.start - window + 1) // page_tokens
