"""Paged attention with Triton kernels of our own: any torch, any page size, no compiler but Triton's."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.paged_attention import triton_kernels
from engine.backends.paged_attention.interface import CallShape

# How the Triton kernels cut up their work: pure decisions about sizes, made on the host.

MAX_SPLITS = 64
"""Parts that one sequence's keys are split into at most."""

MIN_SPLIT_TOKENS = 256
"""Keys that make a part worth its own program and its place in the reduction."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs that a multiprocessor works on side by side, and so how many are wanted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as far as sizes depend on it: multiprocessors and compute capability."""

    processors: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share: block_m query rows, block_n keys at a time; and how Triton is to compile it."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_for(rows: int, head_dim: int, capability: tuple[int, int]) -> Tile:
    """Sizes for `rows` query rows per key head (q_len * group).

    Queries and `stages` pairs of key and value blocks lie in shared memory, two bytes an element: max 96 KiB, which
    every card since Ampere has, and 48 KiB on Turing, whose compiler takes some more and which has 64.
    """
    wide, turing = head_dim > 128, capability < (8, 0)
    most = (64 if turing else 128) // (2 if wide else 1)
    block_m = min(most, max(16, power_of_two(rows)))
    return Tile(
        block_m=block_m,
        block_n=32 if wide else 64,
        warps=8 if block_m * (2 if wide else 1) == 128 else 4,
        stages=1 if turing else 2,
    )


def split_count(programs: int, tokens: int, gpu: Gpu) -> int:
    """Parts to split each sequence's keys into (flash-decoding, Dao et al. 2023): as many as keep the GPU busy.

    programs: those there would be without splitting.  tokens: keys that the longest sequence may look at. Shorter
    ones are split into as many parts, smaller ones.
    """
    wanted = gpu.processors * PROGRAMS_PER_PROCESSOR
    if 2 * programs > wanted:
        return 1
    return max(1, min(wanted // programs, tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()


_LOG2_E = math.log2(math.e)
_INTERPRETED = Gpu(processors=132, capability=(9, 0))
"""What Triton's interpreter, which works on a CPU's tensors, cuts the work up for: an H100."""


def paged_attention(
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
) -> Tensor:
    """See `interface.PagedAttention`. Half precision, D up to 256."""
    shape = CallShape.of(q, k_new, v_new, k_pages, block_table)
    if q.dtype not in (torch.float16, torch.bfloat16) or shape.head_dim > 256:
        raise ValueError(f"heads of {shape.head_dim} {q.dtype}: the Triton kernel takes up to 256 of half precision")
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise ValueError("the last dimension of k_pages and v_pages must be dense")
    q, block_table = _dense(q), _dense(block_table)
    with torch.cuda.device_of(q):
        if k_new is not None and v_new is not None:
            _append(shape, _dense(k_new), _dense(v_new), k_pages, v_pages, lengths, block_table)
        added = 0 if k_new is None else shape.q_len
        return _attend(shape, q, k_pages, v_pages, lengths, block_table, added, scale, window or 0, softcap)


def _append(
    shape: CallShape, k_new: Tensor, v_new: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor, table: Tensor
) -> None:
    triton_kernels.append_kernel[(shape.batch * shape.q_len,)](
        k_new,
        v_new,
        k_pages,
        v_pages,
        lengths,
        table,
        table.stride(0),
        shape.q_len,
        *k_new.stride()[:3],
        *v_new.stride()[:3],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_tokens=shape.page_tokens,
        block_h=power_of_two(shape.kv_heads),
        block_d=power_of_two(shape.head_dim),
    )


def _attend(
    shape: CallShape,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    lengths: Tensor,
    table: Tensor,
    added: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    gpu = _gpu(q.device)
    tile = tile_for(shape.q_len * shape.group, shape.head_dim, gpu.capability)
    programs = -(-shape.q_len * shape.group // tile.block_m) * shape.batch * shape.kv_heads
    reach = min(shape.max_tokens, window + shape.q_len) if window else shape.max_tokens
    splits = split_count(programs, reach, gpu) if programs else 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial = (*q.shape[:3], splits) if splits > 1 else (0,)
    parts = torch.empty((*partial, shape.head_dim), dtype=torch.float32, device=q.device)
    part_sums = torch.empty(partial, dtype=torch.float32, device=q.device)
    if not programs:
        return out
    block_d = max(16, power_of_two(shape.head_dim))
    triton_kernels.attend_kernel[(programs, splits)](
        q,
        k_pages,
        v_pages,
        out,
        parts,
        part_sums,
        lengths,
        table,
        table.stride(0),
        shape.q_len,
        added,
        splits,
        *_factors(scale, softcap),
        *q.stride()[:3],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        page_tokens=shape.page_tokens,
        window=window,
        capped=bool(softcap),
        upcast=q.dtype == torch.bfloat16 and q.device.type != "cuda",
        split=splits > 1,
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_d=block_d,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        triton_kernels.combine_kernel[(out.numel() // shape.head_dim,)](
            parts, part_sums, out, splits, head_dim=shape.head_dim, block_s=MAX_SPLITS, block_d=block_d
        )
    return out


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return the factors of scores before and after the soft-cap, for powers of two."""
    if softcap:
        return 2 * _LOG2_E * scale / softcap, _LOG2_E * softcap
    return _LOG2_E * scale, 1.0


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension dense: itself where it is so."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return _INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, (found.major, found.minor))
