"""StepPlan: index tensors and masks of one step, built once and used by every layer."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.common.step_memory import SLACK_PAIRS, StepSizes
from engine.backends.paged_attention.interface import PagedAttention, VarlenChunks, VarlenWork, varlen_chunks
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.kv.staging import ContiguousKvStaging, StagingStep
from engine.backends.torch.model.lora import Adapted, AdaptedRows, LoraAdapter, adapted_rows
from engine.backends.torch.native.attention import NativeAttention, NativeStep

# Which chunks of a step attend together. Integers only.

MAX_BATCHED_WIDTH = 32
"""Longer chunks attend separately; shorter ones are padded together."""


def by_length(numbers: Iterable[int], chunks: Sequence[ChunkInput]) -> list[int]:
    """Return indices of chunks, sorted by their length, then by their end."""
    return sorted(numbers, key=lambda index: (len(chunks[index].token_ids), chunks[index].end))


def equally_long(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split indices of chunks, sorted by length, into runs of equal length."""
    return [list(run) for _, run in itertools.groupby(order, key=lambda index: len(chunks[index].token_ids))]


def group_chunks(order: Sequence[int], chunks: Sequence[ChunkInput]) -> list[list[int]]:
    """Split indices of chunks, sorted by length, into groups where padding costs less than more calls would."""
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


# Groups of chunks over gathered pages: padding, key ranges and masks.


@dataclass(frozen=True, slots=True)
class KeyView:
    """The keys of a group's queries, for one window.

    pages: page ids, equally many per sequence, or a slice where one sequence's pages are adjacent.
    skip, tokens: range of those pages' tokens.  own_rows: True if the keys are the group's own rows, not pages.
    mask: added to the scores, or None.  causal: True for a plain causal mask.
    stale: [n] indices of gathered tokens after their sequence's last one; None where there are none.
    """

    pages: Tensor | slice
    skip: int
    tokens: int
    mask: Tensor | None
    own_rows: bool = False
    causal: bool = False
    stale: Tensor | None = None

    def copied_pages(self, copies_runs: bool) -> int:
        """Return the number of pages that are copied; adjacent ones only with `copies_runs`."""
        if isinstance(self.pages, Tensor):
            return len(self.pages)
        return len(range(self.pages.stop)[self.pages]) if copies_runs and not self.own_rows else 0


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Chunks that attend in one call: adjacent rows of the batch.

    width: query rows per sequence, padding included.  pad_rows: row indices that pad each sequence to `width`.
    real_rows: padded rows that are not padding. Both None where all chunks are equally long.
    views: by window of the model.
    """

    first_row: int
    end_row: int
    sequences: int
    width: int
    pad_rows: Tensor | None
    real_rows: Tensor | None
    views: dict[int | None, KeyView]


class GroupPlanner:
    """Plans the attention of groups. shared: query heads per key head; the other arguments are StepPlanner's."""

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
        """Return the group of these chunks, whose rows of the batch start at `first_row`."""
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
        """Return page ids that cover `tokens` tokens of each member; a shorter one repeats its last page."""
        count = -(-tokens // self._page_tokens)
        rows = [chunk.pages[first : first + count] for chunk, first in zip(members, first_pages, strict=True)]
        if len(rows) == 1 and list(rows[0]) == list(range(rows[0][0], rows[0][0] + count)):
            return slice(rows[0][0], rows[0][0] + count)
        return self._tensor([page for row in rows for page in (*row, *[row[-1]] * (count - len(row)))])

    def _stale(self, lengths: Sequence[int], tokens: int) -> Tensor | None:
        """Return the indices of gathered tokens beyond each sequence's length."""
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
        """Return the additive mask: 0 where a query attends to a key, else -inf.

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
    """Return the index of the page with the first token that the chunk's first query attends to."""
    return 0 if window is None else max(0, chunk.start - window + 1) // page_tokens


# Plans for paged attention, which reads the pages in place: lengths and block tables.


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The attention of all rows of a step, in one call.

    lengths int32 [chunks]: tokens in the pages, this step's included.  block_table int32 [chunks, pages of the
    longest]: padded with 0.  chunks: their lengths; None where each is one row.
    """

    attention: PagedAttention
    lengths: Tensor
    block_table: Tensor
    chunks: VarlenChunks | None = None


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of a model: of queries, of keys, and the size of each."""

    heads: int
    kv_heads: int
    head_dim: int


def plan_pages(
    attention: PagedAttention,
    ordered: Sequence[ChunkInput],
    page_tokens: int,
    counts: HeadCounts,
    device: torch.device,
) -> PagedPlan:
    """Plan attention over the pages of chunks that are sorted by length."""
    ends = [chunk.end for chunk in ordered]
    q_lens = tuple(len(chunk.token_ids) for chunk in ordered)
    table = block_tables(ordered, -(-max(ends) // page_tokens))

    chunks = None
    if q_lens[-1] > 1:
        numbers = {"heads": counts.heads, "kv_heads": counts.kv_heads, "head_dim": counts.head_dim}
        chunks = varlen_chunks(attention, q_lens, ends, **numbers, device=device)
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    return PagedPlan(attention, lengths, torch.from_numpy(table).to(device), chunks)


def block_tables(chunks: Sequence[ChunkInput], width: int) -> NDArray[np.int32]:
    """Return the first `width` page ids of each chunk, padded with 0: [chunks, width]."""
    lines = [array("i", chunk.pages[:width]).tobytes().ljust(4 * width, b"\0") for chunk in chunks]
    return np.frombuffer(bytearray().join(lines), np.int32).reshape(len(chunks), width)


_NONE: Mapping[str, LoraAdapter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as tensors on the model's device; rows are ordered so that each group's are adjacent.

    ids, positions, slots: [T].  sampled_rows: rows whose logits are needed, in the order of the chunks.
    staged: the first rows, which attend over the KV staging, if there is one.  groups: the others, over gathered pages;
    empty with `paged`, attention over the pages in place, or `native`, which needs no `slots` either.
    adapted: rows with LoRA adapters.
    prompt_states: by index of the chunk, rows whose final states are needed for output about the prompt.
    prefilled: rows of each prefilling chunk, in order.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_rows: Tensor
    groups: tuple[QueryGroup, ...]
    paged: PagedPlan | None = None
    adapted: tuple[Adapted, ...] = ()
    prompt_states: Mapping[int, range] = field(default_factory=dict)
    native: NativeStep | None = None
    staged: StagingStep | None = None
    prefilled: tuple[range, ...] = ()

    def on(self, device: torch.device) -> StepPlan:
        """Return the step on `device`; itself if it is there."""
        if self.ids.device == device:
            return self
        copy: StepPlan = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return copy

    def sizes(
        self, page_tokens: int, *, copies_runs: bool = False, max_state_rows: int = 0, fused: bool = False
    ) -> StepSizes:
        """Return the sizes that determine its memory.

        copies_runs: True if adjacent pages are copied too.  max_state_rows: prompt states processed at once.
        fused: True if all blocks are fused, as far as its rows have no adapters.
        """
        views = [view for group in self.groups for view in group.views.values()]
        staged, copied, masked = self.staged.sizes if self.staged is not None else (0, 0, 0)
        return StepSizes(
            rows=len(self.ids),
            sampled=len(self.sampled_rows),
            padded=max((staged, *(group.sequences * group.width for group in self.groups))),
            gathered=max(copied, page_tokens * max((view.copied_pages(copies_runs) for view in views), default=0)),
            masked=masked + sum(view.mask.numel() for view in views if view.mask is not None),
            native=self.native is not None,
            fused=fused and not self.adapted,
            prompt_states=min(max_state_rows, max(map(len, self.prompt_states.values()), default=0)),
        )


class StepPlanner:
    """Plans steps for one model. windows: the distinct windows of its layers.

    paged, native: attention over the pages in place; with neither they are gathered.  masks: True if attention needs a
    mask even where it is causal.  kv_staging: contiguous copies of decodes' pages.  adapters: by key.
    """

    def __init__(
        self,
        windows: frozenset[int | None],
        counts: HeadCounts,
        page_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        paged: PagedAttention | None = None,
        native: NativeAttention | None = None,
        masks: bool = False,
        kv_staging: ContiguousKvStaging | None = None,
        adapters: Mapping[str, LoraAdapter] = _NONE,
    ) -> None:
        shared = counts.heads // counts.kv_heads
        self._groups = GroupPlanner(windows, shared, page_tokens, dtype=dtype, device=device, masks=masks)
        self._counts, self._page_tokens, self._device = counts, page_tokens, device
        self._paged, self._native, self._kv_staging, self._adapters = paged, native, kv_staging, adapters

    def plan(self, chunks: Sequence[ChunkInput]) -> StepPlan:
        """Sort `chunks` by length and group them, with one adapter's chunks adjacent in each group, and build the
        tensors for the layers."""
        if self._native is not None:
            return self._plan_native(chunks, self._native)
        staged = self._kv_staging.step(chunks) if self._kv_staging is not None else None
        staged_chunks = list(staged.chunks) if staged is not None else []
        others = by_length(set(range(len(chunks))).difference(staged_chunks), chunks)
        runs = group_chunks(others, chunks) if self._paged is None else equally_long(others, chunks)
        if any(chunk.adapter for chunk in chunks):
            runs = [sorted(run, key=lambda index: chunks[index].adapter) for run in runs]
        order = [*staged_chunks, *(index for run in runs for index in run)]
        ordered = [chunks[index] for index in order]
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in ordered))
        last_row = {index: end - 1 for index, end in zip(order, ends, strict=True)}
        groups: list[QueryGroup] = []
        for run in runs if self._paged is None else ():
            first_row = groups[-1].end_row if groups else len(staged_chunks)
            groups.append(self._groups.group([chunks[index] for index in run], first_row))
        paged = None
        if self._paged is not None and ordered:
            paged = plan_pages(self._paged, ordered, self._page_tokens, self._counts, self._device)
        return StepPlan(
            ids=self._tensor([token for chunk in ordered for token in chunk.token_ids]),
            positions=self._tensor([position for chunk in ordered for position in range(chunk.start, chunk.end)]),
            slots=self._tensor([slot for chunk in ordered for slot in _slots(chunk, self._page_tokens)]),
            sampled_rows=self._tensor(sampled_rows(chunks, last_row)),
            groups=tuple(groups),
            paged=paged,
            adapted=adapted_rows(ordered, self._adapters, self._device),
            prompt_states=_prompt_state_rows(chunks, last_row),
            staged=staged,
            prefilled=_prefilled_rows(chunks, last_row),
        )

    def _plan_native(self, chunks: Sequence[ChunkInput], attention: NativeAttention) -> StepPlan:
        """Plan a step where all chunks attend in one call: in their order, except that adapters are adjacent."""
        order = list(range(len(chunks)))
        if any(chunk.adapter for chunk in chunks):
            order.sort(key=lambda index: chunks[index].adapter)
        ordered = [chunks[index] for index in order]
        step = attention.step(ordered)
        last_row = dict(zip(order, step.last_rows, strict=True))
        rows, wanted = len(step.positions), sampled_rows(chunks, last_row)
        numbers = [token for chunk in ordered for token in chunk.token_ids] + step.positions + wanted
        ids, positions, sampled, slots = self._tensor(numbers).split((rows, rows, len(wanted), 0))
        return StepPlan(
            ids=ids,
            positions=positions,
            slots=slots,
            sampled_rows=sampled,
            groups=(),
            adapted=adapted_rows(ordered, self._adapters, self._device),
            prompt_states=_prompt_state_rows(chunks, last_row),
            native=step,
            prefilled=_prefilled_rows(chunks, last_row),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def map_tensors(part: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a plan, or a part of one, with `convert` applied to each of its tensors, in a fixed order."""
    match part:
        case Tensor():
            return convert(part)
        case tuple():
            return tuple(map_tensors(each, convert) for each in part)
        case dict():
            return {key: map_tensors(each, convert) for key, each in part.items()}
        case KeyView() | QueryGroup() | StepPlan() | PagedPlan() | VarlenChunks() | VarlenWork() | AdaptedRows():
            return replace(part, **{name: map_tensors(getattr(part, name), convert) for name in part.__slots__})
        case _:
            return part


def _slots(chunk: ChunkInput, page_tokens: int) -> list[int]:
    return [
        chunk.pages[position // page_tokens] * page_tokens + position % page_tokens
        for position in range(chunk.start, chunk.end)
    ]


def sampled_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int] | Sequence[int]) -> list[int]:
    """Return the rows whose logits are needed, in the order of the chunks. last_row: by index of the chunk."""
    return [last_row[index] - back for index, chunk in enumerate(chunks) for back in reversed(range(chunk.num_sampled))]


def _prefilled_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int]) -> tuple[range, ...]:
    return tuple(
        range(last_row[index] + 1 - len(chunk.token_ids), last_row[index] + 1)
        for index, chunk in enumerate(chunks)
        if chunk.prefills
    )


def _prompt_state_rows(chunks: Sequence[ChunkInput], last_row: Mapping[int, int]) -> dict[int, range]:
    """Return the rows of each chunk's `prompt_states`, by index of the chunk."""
    firsts = {
        index: last_row[index] + 1 - len(chunk.token_ids) for index, chunk in enumerate(chunks) if chunk.prompt_states
    }
    return {
        index: range(first + chunks[index].prompt_states.start, first + chunks[index].prompt_states.stop)
        for index, first in firsts.items()
    }
