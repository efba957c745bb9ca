"""From the chunks of one step to index tensors and masks: made once per step, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.backends.paged_attention.face import PagedAttention
from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.chunk_groups import by_length, equally_long, grouped
from engine.backends.torch.lora import AdaptedRows, LoraAdapter, adapted_rows
from engine.backends.torch.mirror import Mirror, MirrorStep
from engine.backends.torch.native.attention import NativeAttention, NativeStep
from engine.backends.torch.paged_plan import PagedGroup, PagedPlan, paged_groups
from engine.backends.torch.query_groups import GroupPlanner, KeyView, QueryGroup
from engine.backends.torch.step_memory import StepSizes

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
    mirrored: MirrorStep | None = None
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
        mirror: Mirror | None = None,
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
