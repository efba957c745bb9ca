"""Paged attention by definition: one query at a time, in float64; and calls to compare it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.backends.paged_attention.interface import PagedAttention, varlen_chunks

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Case:
    """One call. lengths: tokens of each sequence before it.  given: keys of the new tokens come with the call; if
    not, they are in the pages already.  strided: keys and values are halves of one pool."""

    name: str
    lengths: tuple[int, ...]
    q_len: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_tokens: int = 16
    window: int | None = None
    softcap: float = 0.0
    given: bool = True
    strided: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass
class Call:
    """The tensors of a case. Whatever no token lies in is NaN, and pages are dealt out of order."""

    case: Case
    dtype: torch.dtype
    device: str = "cpu"
    q: Tensor = field(init=False)
    new: Tensor = field(init=False)
    pool: Tensor = field(init=False)
    table: Tensor = field(init=False)
    sequences: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        generator = torch.Generator().manual_seed(len(case.name) + case.head_dim)
        batch, size = len(case.lengths), case.head_dim
        rows = torch.randn(batch, case.q_len, case.heads + 2 * case.kv_heads, size, generator=generator)
        rows = rows.to(self.dtype)
        self.q, self.new = rows[:, :, : case.heads].to(self.device), rows[:, :, case.heads :].to(self.device)
        counts = [-(-(length + case.q_len) // case.page_tokens) for length in case.lengths]
        pages = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        pool = torch.full((len(pages), case.page_tokens, 2 * case.kv_heads, size), torch.nan, dtype=self.dtype)
        self.table = torch.zeros(batch, max(counts), dtype=torch.int32)
        self.sequences = []
        for index, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
            mine = [pages.pop() for _ in range(count)]
            self.table[index, :count] = torch.tensor(mine, dtype=torch.int32)
            old = torch.randn(length, 2 * case.kv_heads, size, generator=generator).to(self.dtype)
            known = torch.cat((old, rows[index, :, case.heads :]))
            for position, token in enumerate(old if case.given else known):
                pool[mine[position // case.page_tokens], position % case.page_tokens] = token
            self.sequences.append(known)
        self.pool, self.table = pool.to(self.device), self.table.to(self.device)

    def run(self, attention: PagedAttention) -> Tensor:
        """The result; `pool` is written to."""
        case = self.case
        before = torch.tensor(case.lengths, dtype=torch.int32, device=self.device)
        pages = self.pool.chunk(2, dim=2)
        if not case.strided:
            pages = [half.contiguous() for half in pages]
        k_new, v_new = self.new.chunk(2, dim=2) if case.given else (None, None)
        out = attention(
            self.q,
            k_new,
            v_new,
            *pages,
            before if case.given else before + case.q_len,
            self.table,
            scale=case.head_dim**-0.5,
            window=case.window,
            softcap=case.softcap,
        )
        self.pool = torch.cat(tuple(pages), dim=2)
        return out

    def expected(self) -> Tensor:
        """What it should be, float64 [B, q_len, Hq, D]."""
        return torch.stack([attend(q, known, self.case) for q, known in zip(self.q.cpu(), self.sequences, strict=True)])

    def expected_pool(self) -> Tensor:
        """The pool after the new tokens were written, one at a time."""
        pool = self.pool.clone()
        for known, pages in zip(self.sequences, self.table.tolist(), strict=True):
            for position, token in enumerate(known):
                pool[pages[position // self.case.page_tokens], position % self.case.page_tokens] = token
        return pool


@dataclass
class VarlenCall:
    """A call of sequences with different numbers of new tokens, `q_lens` after `case.lengths`, whose keys lie in the
    pages. Whatever no token lies in is NaN, and pages are dealt out of order."""

    case: Case
    q_lens: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Draw the tensors."""
        case, generator = self.case, torch.Generator().manual_seed(len(self.case.name) + self.case.head_dim)
        self.totals = [length + q_len for length, q_len in zip(case.lengths, self.q_lens, strict=True)]
        counts = [-(-total // case.page_tokens) for total in self.totals]
        pages = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        shape = (len(pages), case.page_tokens, 2 * case.kv_heads, case.head_dim)
        pool = torch.full(shape, torch.nan, dtype=self.dtype)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        self.sequences: list[Tensor] = []
        for index, (total, count) in enumerate(zip(self.totals, counts, strict=True)):
            mine = [pages.pop() for _ in range(count)]
            table[index, :count] = torch.tensor(mine, dtype=torch.int32)
            known = torch.randn(total, 2 * case.kv_heads, case.head_dim, generator=generator).to(self.dtype)
            for position, token in enumerate(known):
                pool[mine[position // case.page_tokens], position % case.page_tokens] = token
            self.sequences.append(known)
        rows = torch.randn(sum(self.q_lens), case.heads + 2, case.head_dim, generator=generator).to(self.dtype)
        self.q = rows.to(self.device)[:, : case.heads]
        self.pool, self.table = pool.to(self.device), table.to(self.device)

    def run(self, attention: PagedAttention, pool: Tensor | None = None) -> Tensor:
        """The result, over `pool` in place of its own."""
        return self.prepared(attention, pool)()

    def prepared(self, attention: PagedAttention, pool: Tensor | None = None) -> Callable[[], Tensor]:
        """The call, planned once as for all layers of a step."""
        case, device = self.case, torch.device(self.device)
        counts = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
        chunks = varlen_chunks(attention, self.q_lens, self.totals, **counts, device=device)
        pages = (self.pool if pool is None else pool).chunk(2, dim=2)
        lengths = torch.tensor(self.totals, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
        return lambda: attention(self.q, None, None, *pages, lengths, self.table, chunks=chunks, **options)

    def by_length(self, attention: PagedAttention) -> Callable[[], list[Tensor]]:
        """The same with a call for each length: a result of each, in order."""
        case, lengths = self.case, torch.tensor(self.totals, dtype=torch.int32, device=self.device)
        options: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        row = sequence = 0
        for q_len, run in itertools.groupby(self.q_lens):
            count = len(list(run))
            rows, some = slice(row, row + count * q_len), slice(sequence, sequence + count)
            calls.append((self.q[rows].unflatten(0, (count, q_len)), lengths[some].clone(), self.table[some].clone()))
            row, sequence = rows.stop, some.stop
        keys, values = self.pool.chunk(2, dim=2)
        return lambda: [attention(q, None, None, keys, values, *each, **options).flatten(0, 1) for q, *each in calls]

    def pages(self) -> dict[str, Tensor]:
        """Its pages, by the names of arguments."""
        return dict(zip(("k_pages", "v_pages"), self.pool.chunk(2, dim=2), strict=True))

    def expected(self) -> Tensor:
        """What it should be, float64 [T, Hq, D]."""
        rows = self.q.cpu().split(list(self.q_lens))
        return torch.cat([attend(q, known, self.case) for q, known in zip(rows, self.sequences, strict=True)])


def attend(q: Tensor, known: Tensor, case: Case) -> Tensor:
    """q [n, Hq, D] of the last n tokens over `known` [L, 2 * Hkv, D], in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    keys, values = known.double().chunk(2, dim=1)
    for row in range(len(q)):
        last = len(known) - len(q) + row
        first = 0 if case.window is None else max(0, last - case.window + 1)
        for head in range(q.shape[1]):
            mine = head // (case.heads // case.kv_heads)
            scores = keys[first : last + 1, mine] @ q[row, head].double() * case.head_dim**-0.5
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            out[row, head] = scores.softmax(0) @ values[first : last + 1, mine]
    return out


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal, NaN by NaN."""
    bits = _BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))
