"""Interface of paged attention, and the function of each implementation by its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.backends.common.kv_format import ApartCodes, HeadFormat
from engine.backends.paged_attention.choose import ImplementationName
from engine.backends.triton_launch import claim_triton_cache


@dataclass(frozen=True, slots=True)
class VarlenWork:
    """The work of a call with `VarlenChunks`, cut up by the host.

    items int32 [n, 5], merges int32 [m, 4]: see `triton_varlen_kernels`.  part_rows: rows of scratch.
    """

    items: Tensor
    merges: Tensor
    part_rows: int


@dataclass(frozen=True, slots=True)
class VarlenChunks:
    """Numbers of new tokens of the sequences of a call, where they differ.

    q_lens: of each sequence, ascending.  starts int32 [B + 1]: the first row of each, and all rows.  key_starts int32
    [B + 1]: the tokens in the pages of all sequences before each, and of all.
    work: from `CompiledAttention.schedule`, for such.
    """

    q_lens: tuple[int, ...]
    starts: Tensor
    key_starts: Tensor
    work: VarlenWork | None = None


class PagedAttention(Protocol):
    """Causal attention of a few new tokens per sequence over pages, as flash-attn's flash_attn_with_kvcache does it.

    q [B, q_len, Hq, D]: the queries of each sequence's last q_len tokens.
    k_new, v_new [B, q_len, Hkv, D]: their keys and values, which are written into the pages first, in place; both
        None where they are there already.
    k_pages, v_pages [P, page_tokens, Hkv, D]: may be strided views; only the last dimension must be dense.
    lengths int32 [B]: tokens in the pages before this call; where k_new is None, the new ones counted.
    block_table int32 [B, max_pages]: page ids of each sequence in order, padded with any valid id (0, say). It must
        cover every token, the new ones too.
    scale: what the dot products are multiplied by.  window: tokens that a query sees at most, itself included.
    softcap: scores become softcap * tanh(score / softcap); 0 is off.
    chunks: numbers of new tokens of each sequence, where they differ; q is [sum of them, Hq, D] then, as is the
        result, and k_new and v_new are None.

    Query i of a sequence of n tokens stands at position n - q_len + i and sees every key up to there (the mask is
    aligned bottom-right). One that sees none gives zeros. Pages that no token falls into stay as they are; what lies
    in a page after the last token never matters, be it NaN. Nothing waits for the device.

    Returns [B, q_len, Hq, D], contiguous. Raises ValueError where shapes or dtypes do not go together.
    """

    def __call__(
        self,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
        chunks: VarlenChunks | None = None,
    ) -> Tensor: ...


@runtime_checkable
class CompiledAttention(PagedAttention, Protocol):
    """Paged attention whose kernels are compiled for a model, when they are first needed or before, and whose work the
    host cuts up where the numbers of new tokens differ."""

    def schedule(
        self, q_lens: Sequence[int], lengths: Sequence[int], *, heads: int, kv_heads: int, head_dim: int
    ) -> VarlenWork:
        """Return, on the CPU, the work of sequences with `q_lens` new tokens and `lengths` tokens in the
        pages, the new ones counted."""

    def prepare(
        self,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        windows: Collection[int | None],
        softcap: float,
        varlen: bool,
        report: Callable[[int, int], None],
    ) -> None:
        """Compile all kernels that calls of any batch, q_len and block table can meet, by calling each once.

        q [PREPARED_ROWS, Hq, D]; k_new, v_new [PREPARED_ROWS, Hkv, D] or None: rows that lie as those of real calls do.
        k_pages, v_pages: the pages, of which the first is unused.  windows: of all layers.  varlen: True if q_len is 1
        in all calls but those with `chunks`.  report: called with calls done and their number.
        """


def varlen_chunks(
    attention: PagedAttention,
    q_lens: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> VarlenChunks:
    """Return on `device` the chunks of sequences with `q_lens` new tokens, ascending, and `lengths` tokens in the
    pages, the new ones counted."""
    tables = ([0, *itertools.accumulate(each)] for each in (q_lens, lengths))
    starts, key_starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in tables)
    if not isinstance(attention, CompiledAttention):
        return VarlenChunks(tuple(q_lens), starts, key_starts)
    work = attention.schedule(q_lens, lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    work = replace(work, items=work.items.to(device), merges=work.merges.to(device))
    return VarlenChunks(tuple(q_lens), starts, key_starts, work)


PREPARED_ROWS = 129
"""Tokens of the longest call that `CompiledAttention.prepare` makes."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The sizes of one call. group: query heads per key head.  max_pages: width of the block table."""

    batch: int
    q_len: int
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    max_pages: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        k_pages: Tensor,
        block_table: Tensor,
        codes: HeadFormat | ApartCodes | None = None,
    ) -> CallShape:
        """Read the sizes off the tensors. codes: where pages have codes. Raises ValueError where they do not go
        together."""
        batch, q_len, heads, head_dim = q.shape
        page_tokens, kv_heads = k_pages.shape[1:3]
        stored = (head_dim, q.dtype) if codes is None else (codes.head_bytes, torch.int8)
        if (k_pages.shape[3], k_pages.dtype) != stored or heads % kv_heads:
            raise ValueError(
                f"{heads} query heads of {head_dim} {q.dtype} do not go with {kv_heads} key heads of "
                f"{k_pages.shape[3]} {k_pages.dtype}"
            )
        if len(block_table) != batch:
            raise ValueError(f"the block table has {len(block_table)} rows for {batch} sequences")
        for name, new in (("k_new", k_new), ("v_new", v_new)):
            if new is not None and new.shape != (batch, q_len, kv_heads, head_dim):
                raise ValueError(f"{name} is {list(new.shape)} where {[batch, q_len, kv_heads, head_dim]} is needed")
        if (k_new is None) != (v_new is None):
            raise ValueError("k_new and v_new come together or not at all")
        return cls(batch, q_len, heads, kv_heads, head_dim, page_tokens, block_table.shape[1])

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def max_tokens(self) -> int:
        """Tokens that a sequence has at most, known without asking the device."""
        return self.max_pages * self.page_tokens


def implementation(
    name: ImplementationName, heads: HeadFormat | None = None, devices: Sequence[torch.device] = ()
) -> PagedAttention:
    """The function of that name. Imports what it needs, which `choose` has found to be there. heads: how they lie in
    the pages, for Triton, which reads codes too.  devices: on which it will compute, for Triton's `schedule`.

    Raises ValueError for native attention, which has another interface, as it lays pages out in its own way; OSError
    where what Triton compiles cannot be kept from other users.
    """
    if name == "native":
        raise ValueError("native attention is not called over pages of tensors")
    if name == "flash":
        from engine.backends.paged_attention import flash

        return flash.paged_attention
    if name == "triton":
        from engine.backends.paged_attention import triton_attention

        claim_triton_cache()
        return triton_attention.TritonAttention(heads, devices)
    if name == "varlen":
        from engine.backends.paged_attention import varlen

        return varlen.paged_attention
    from engine.backends.paged_attention import gathered

    return gathered.paged_attention
