"""The step's plan where an implementation of paged attention reads the pages itself: lengths and block tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.paged_attention.face import PagedAttention
from engine.backends.torch.batch import ChunkInput


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
