"""From the chunks of one step to index tensors and masks: made once per step, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.backends.common.step_memory import SLACK_PAIRS, StepSizes
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.kv.staging import ContiguousKvStaging, StagingStep
from engine.backends.torch.model.lora import AdaptedRows, LoraAdapter, adapted_rows
from engine.backends.torch.native.attention import NativeAttention, NativeStep

# Which chunks of a step attend together. Integers only.

MAX_BATCHED_WIDTH = 32
"""Chunks longer than this attend by themselves; shorter ones are padded together."""


def by_length(numbers: Iterable[int], chunks: Sequence[ChunkInput]) -> list[int]:
    """The numbers of chunks in order of the chunks' length, and of where they end."""
    return sorted(numbers, key=lambda index: (len(chunks[index].token_ids), chunks[index].end))


def equally_long(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split the numbers of chunks, in order of their length, by that length."""
    return [list(run) for _, run in itertools.groupby(order, key=lambda index: len(chunks[index].token_ids))]


def grouped(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split the numbers of chunks, in order of their length, so that padding costs less than further calls would."""
    groups: list[list[int]] = []
    real_pairs = longest = 0
    for index in order:
        chunk = chunks[index]
        width = len(chunk.token_ids)
        pairs = width * chunk.end
        joined_longest = max(longest, chunk.end)
        if groups and width <= MAX_BATCHED_WIDTH:
            padded_pairs = (len(groups[-1]) + 1) * width * joined_longest
            if padded_pairs <= 1.5 * (real_pairs + pairs) + SLACK_PAIRS:
                groups[-1].append(index)
                real_pairs, longest = real_pairs + pairs, joined_longest
                continue
        groups.append([index])
        real_pairs, longest = pairs, chunk.end
    return groups


# Chunks that attend together over gathered pages: their padding, the keys that they look at, and the masks.


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


# The step's plan where an implementation of paged attention reads the pages itself: lengths and block tables.


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Equally long chunks, which attend in one call: adjacent rows of the batch.

    width: rows per sequence.  lengths int32 [sequences]: tokens in the pages, this step's counted.
    block_table int32 [sequences, pages of the longest]: padded with 0.
    """

    first_row: int
    end_row: int
    width: int
    lengths: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Groups that cover all rows in order, and what computes them."""

    attention: PagedAttention
    groups: tuple[PagedGroup, ...]


def paged_groups(ordered: Sequence[ChunkInput], page_tokens: int, device: torch.device) -> tuple[PagedGroup, ...]:
    """Group chunks that are sorted by their length. The decodes of a step are one group."""
    groups: list[PagedGroup] = []
    for width, chunks in itertools.groupby(ordered, key=lambda chunk: len(chunk.token_ids)):
        members = list(chunks)
        first_row = groups[-1].end_row if groups else 0
        groups.append(
            PagedGroup(
                first_row=first_row,
                end_row=first_row + width * len(members),
                width=width,
                lengths=torch.tensor([chunk.end for chunk in members], dtype=torch.int32, device=device),
                block_table=_block_table(members, page_tokens).to(device),
            )
        )
    return tuple(groups)


def _block_table(members: Sequence[ChunkInput], page_tokens: int) -> Tensor:
    counts = [-(-chunk.end // page_tokens) for chunk in members]
    table = torch.zeros(len(members), max(counts), dtype=torch.int32)
    for row, chunk, count in zip(table, members, counts, strict=True):
        row[:count] = torch.tensor(chunk.pages[:count], dtype=torch.int32)
    return table


_NONE: Mapping[str, LoraAdapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as tensors on the model's device; rows are ordered so that each group's are adjacent.

    ids, positions, slots: [T].  sampled_rows: rows whose logits are wanted, in the order of the chunks.
    mirrored: how the first rows attend, where there is a mirror.  groups: how the others attend over gathered pages;
    empty where `paged` says how they attend over pages as they lie, or `native`, which needs no `slots` either.
    adapted: the rows that compute with LoRA adapters.
    told: by number of the chunk, the rows whose final states are wanted besides.
    prefilled: rows of each chunk that prefills, in the order of the chunks.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_rows: Tensor
    groups: tuple[QueryGroup, ...]
    paged: PagedPlan | None = None
    adapted: tuple[AdaptedRows, ...] = ()
    told: Mapping[int, range] = field(default_factory=dict)
    native: NativeStep | None = None
    mirrored: StagingStep | None = None
    prefilled: tuple[range, ...] = ()

    def on(self, device: torch.device) -> StepPlan:
        """The same step on `device`; itself where it is there."""
        if self.ids.device == device:
            return self
        moved: StepPlan = mapped(self, lambda tensor: tensor.to(device, non_blocking=True))
        return moved

    def sizes(self, page_tokens: int, *, copies_runs: bool = False, most_told: int = 0) -> StepSizes:
        """What the memory that it takes over pages of `page_tokens` depends on.

        copies_runs: whether adjacent pages are copied out as those that lie apart are.  most_told: told rows that are
        worked on at once.
        """
        views = [view for group in self.groups for view in group.views.values()]
        mirrored, copied, masked = self.mirrored.sizes if self.mirrored is not None else (0, 0, 0)
        return StepSizes(
            rows=len(self.ids),
            sampled=len(self.sampled_rows),
            padded=max((mirrored, *(group.sequences * group.width for group in self.groups))),
            gathered=max(copied, page_tokens * max((view.copied_pages(copies_runs) for view in views), default=0)),
            masked=masked + sum(view.mask.numel() for view in views if view.mask is not None),
            native=self.native is not None,
            told=min(most_told, max(map(len, self.told.values()), default=0)),
        )


class StepPlanner:
    """Plans steps for one model. windows: the distinct windows of its layers.  shared: query heads per key head.

    paged, native: what attends over the pages as they lie; with neither they are gathered.  masks: whether what attends
    takes a mask even for a plain triangle.  mirror: where decodes are kept side by side.  adapters: by the keys that
    chunks name.
    """

    def __init__(
        self,
        windows: frozenset[int | None],
        shared: int,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        paged: PagedAttention | None = None,
        native: NativeAttention | None = None,
        masks: bool = False,
        mirror: ContiguousKvStaging | None = None,
        adapters: Mapping[str, LoraAdapter] = _NONE,
    ) -> None:
        self._groups = GroupPlanner(windows, shared, page_tokens, dtype=dtype, device=device, masks=masks)
        self._page_tokens, self._device = page_tokens, device
        self._paged, self._native, self._mirror, self._adapters = paged, native, mirror, adapters

    def plan(self, chunks: Sequence[ChunkInput]) -> StepPlan:
        """Order `chunks` by length and group them, those of one adapter adjacent in each group where that can be, and
        build what the layers need."""
        if self._native is not None:
            return self._natively(chunks, self._native)
        mirrored = self._mirror.step(chunks) if self._mirror is not None else None
        first = list(mirrored.chunks) if mirrored is not None else []
        others = by_length(set(range(len(chunks))).difference(first), chunks)
        runs = grouped(others, chunks) if self._paged is None else equally_long(others, chunks)
        if any(chunk.adapter for chunk in chunks):
            runs = [sorted(run, key=lambda index: chunks[index].adapter) for run in runs]
        order = [*first, *(index for run in runs for index in run)]
        ordered = [chunks[index] for index in order]
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in ordered))
        last_row = {index: end - 1 for index, end in zip(order, ends, strict=True)}
        groups: list[QueryGroup] = []
        for run in runs if self._paged is None else ():
            first_row = groups[-1].end_row if groups else len(first)
            groups.append(self._groups.group([chunks[index] for index in run], first_row))
        paged = None
        if self._paged is not None:
            paged = PagedPlan(self._paged, paged_groups(ordered, self._page_tokens, self._device))
        return StepPlan(
            ids=self._tensor([token for chunk in ordered for token in chunk.token_ids]),
            positions=self._tensor([position for chunk in ordered for position in range(chunk.start, chunk.end)]),
            slots=self._tensor([slot for chunk in ordered for slot in _slots(chunk, self._page_tokens)]),
            sampled_rows=self._tensor(_sampled_rows(chunks, last_row)),
            groups=tuple(groups),
            paged=paged,
            adapted=adapted_rows(ordered, self._adapters, self._device),
            told=_told_rows(chunks, last_row),
            mirrored=mirrored,
            prefilled=_prefilled_rows(chunks, last_row),
        )

    def _natively(self, chunks: Sequence[ChunkInput], attention: NativeAttention) -> StepPlan:
        """The same where any chunks attend in one call: in their order, but for adapters."""
        order = list(range(len(chunks)))
        if any(chunk.adapter for chunk in chunks):
            order.sort(key=lambda index: chunks[index].adapter)
        ordered = [chunks[index] for index in order]
        step = attention.step(ordered)
        last_row = dict(zip(order, (step.chunks[:, 0] + step.chunks[:, 1] - 1).tolist(), strict=True))
        positions = step.positions()
        return StepPlan(
            ids=self._tensor(list(itertools.chain.from_iterable(chunk.token_ids for chunk in ordered))),
            positions=positions,
            slots=positions[:0],
            sampled_rows=self._tensor(_sampled_rows(chunks, last_row)),
            groups=(),
            adapted=adapted_rows(ordered, self._adapters, self._device),
            told=_told_rows(chunks, last_row),
            native=step,
            prefilled=_prefilled_rows(chunks, last_row),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def mapped(part: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """A plan, or any part of one, with what `to` gives in place of each of its tensors, always in the same order."""
    match part:
        case Tensor():
            return to(part)
        case tuple():
            return tuple(mapped(each, to) for each in part)
        case dict():
            return {key: mapped(each, to) for key, each in part.items()}
        case KeyView() | QueryGroup() | StepPlan() | PagedPlan() | PagedGroup() | AdaptedRows():
            return replace(part, **{name: mapped(getattr(part, name), to) for name in part.__slots__})
        case _:
            return part


def _slots(chunk: ChunkInput, page_tokens: int) -> list[int]:
    return [
        chunk.pages[position // page_tokens] * page_tokens + position % page_tokens
        for position in range(chunk.start, chunk.end)
    ]


def _sampled_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int]) -> list[int]:
    """The rows whose logits are wanted, in the order of the chunks."""
    return [last_row[index] - back for index, chunk in enumerate(chunks) for back in range(chunk.sampled - 1, -1, -1)]


def _prefilled_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int]) -> tuple[range, ...]:
    return tuple(
        range(last_row[index] + 1 - len(chunk.token_ids), last_row[index] + 1)
        for index, chunk in enumerate(chunks)
        if chunk.prefills
    )


def _told_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int]) -> dict[int, range]:
    """By number of the chunk, the rows of the tokens that it tells of."""
    firsts = {index: last_row[index] + 1 - len(chunk.token_ids) for index, chunk in enumerate(chunks) if chunk.told}
    return {
        index: range(first + chunks[index].told.start, first + chunks[index].told.stop)
        for index, first in firsts.items()
    }
