"""Paged attention with Triton kernels of our own: any torch, any page size, no compiler but Triton's.

A decode of one request waits for the host, so a launch must cost little: sizes, strides and the compiled kernel of a
call are looked up under its shapes, and the kernel is launched without Triton's own look at every argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.step_memory import SPLIT_PROGRAMS, max_query_block, split_keys_bytes
from engine.backends.paged_attention import triton_kernels
from engine.backends.paged_attention.interface import CallShape
from engine.backends.triton_launch import Gpu, Kernel, current_stream, gpu_of, is_interpreted, power_of_two

# How the Triton kernels cut up their work: pure decisions about sizes, made on the host.

MAX_SPLITS = 64
"""Parts that one sequence's keys are split into at most."""

MIN_SPLIT_TOKENS = 256
"""Keys that make a part worth its own program and its place in the reduction."""


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
    block_m = min(max_query_block(head_dim, turing=turing), max(16, power_of_two(rows)))
    return Tile(
        block_m=block_m,
        block_n=32 if wide else 64,
        warps=8 if block_m * (2 if wide else 1) == 128 else 4,
        stages=1 if turing else 2,
    )


def split_count(programs: int, tokens: int, gpu: Gpu) -> int:
    """Parts to split each sequence's keys into (flash-decoding, Dao et al. 2023): as many as keep the GPU busy.

    programs: those there would be without splitting.  tokens: keys that the longest sequence may look at. The device
    splits shorter ones into fewer parts, of no less than MIN_SPLIT_TOKENS.
    """
    wanted = gpu.processors * SPLIT_PROGRAMS
    if 2 * programs > wanted:
        return 1
    return max(1, min(wanted // programs, tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


_LOG2_E = math.log2(math.e)
_MAX_PLANS = 4096
_ALIGNED_BYTES = 16
_PREPARED_WIDTH = MAX_SPLITS * MIN_SPLIT_TOKENS


class TritonAttention:
    """Paged attention of one model, see `interface.PagedAttention`. Half precision, D up to 256.

    heads: how heads lie in the pages. Where they are codes, pages are int8 [P, page_tokens, Hkv, head_bytes], keys and
    values are in them already, and queries and results are rotated as the codes are.

    Keeps a plan for every shape of call, and for each stream a scratch of fixed size and place, so that CUDA graphs may
    hold its address.
    """

    def __init__(self, heads: HeadFormat | None = None) -> None:
        self._codes = heads if heads is not None and heads.is_quantised else None
        self._plans: dict[Hashable, _Plan] = {}
        self._variants: dict[Hashable, Kernel] = {}
        self._scratch: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @property
    def variants(self) -> frozenset[Hashable]:
        """The variants of kernels that were needed: each is compiled once."""
        return frozenset(self._variants)

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
    ) -> Tensor:
        """See `interface.PagedAttention`."""
        key = (
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            None if k_new is None else k_new.stride(),
            None if v_new is None else v_new.stride(),
            k_pages.stride(),
            v_pages.stride(),
            block_table.shape,
            block_table.stride(),
            scale,
            window,
            softcap,
        )
        plan = self._plans.get(key)
        if plan is None:
            call = CallShape.of(q, k_new, v_new, k_pages, block_table, self._codes)
            dense = [None if each is None else _dense_rows(each) for each in (q, k_new, v_new)]
            dense.append(block_table if block_table.stride(1) == 1 else block_table.contiguous())
            if any(one is not other for one, other in zip(dense, (q, k_new, v_new, block_table), strict=True)):
                q, k_new, v_new, block_table = dense  # type: ignore[assignment]
                options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
                return self(q, k_new, v_new, k_pages, v_pages, lengths, block_table, **options)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            with torch.cuda.device_of(q):  # where its kernels are loaded
                plan = self._plan(call, q, k_new, v_new, k_pages, v_pages, block_table, scale, window or 0, softcap)
            self._plans[key] = plan
        if k_new is None or v_new is None:
            k_new = v_new = q  # never read
        if plan.guarded and torch.cuda.current_device() != plan.device_index:
            with torch.cuda.device(q.device):
                return self._launch(plan, q, k_new, v_new, k_pages, v_pages, lengths, block_table)
        return self._launch(plan, q, k_new, v_new, k_pages, v_pages, lengths, block_table)

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
        report: Callable[[int, int], None],
    ) -> None:
        """See `interface.CompiledAttention`. Which kernels a call needs depends on its rows alone, and on whether its
        block table is so wide that keys are split."""
        heads, page_tokens = q.shape[1], k_pages.shape[1]
        group, capability = heads // k_pages.shape[2], gpu_of(q.device).capability
        blocks = {tokens: tile_for(tokens * group, q.shape[2], capability).block_m for tokens in range(1, len(q) + 1)}
        # The fewest tokens of each size of block, and of several blocks, for which appending is a kernel of its own.
        first = {(block, tokens * group > block): tokens for tokens, block in reversed(blocks.items())}
        calls = [(window, tokens) for window in windows for tokens in sorted(first.values())]
        table = torch.zeros(1, -(-_PREPARED_WIDTH // page_tokens), dtype=torch.int32, device=q.device)
        for done, (window, tokens) in enumerate(calls):
            report(done, len(calls))
            rows = [None if each is None else each[:tokens].unflatten(0, (1, tokens)) for each in (q, k_new, v_new)]
            lengths = torch.full((1,), 0 if k_new is not None else tokens, dtype=torch.int32, device=q.device)
            options: dict[str, Any] = {"scale": q.shape[2] ** -0.5, "window": window, "softcap": softcap}
            self(rows[0], rows[1], rows[2], k_pages, v_pages, lengths, table, **options)  # type: ignore[arg-type]
        report(len(calls), len(calls))

    def _launch(
        self,
        plan: _Plan,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        out = q.new_empty(plan.out_shape)
        if plan.attend is None:
            return out
        stream = plan.current_stream(plan.device_index)
        parts, sums = self._parts(q, stream, plan.parts_bytes) if plan.combine is not None else (plan.unsplit,) * 2
        tensors = (q, k_new, v_new, k_pages, v_pages, out, parts, sums, lengths, block_table)
        at = [tensor.data_ptr() for tensor in tensors]
        bits = at[0] | at[1] | at[2] | at[3] | at[4] | at[5] | at[6] | at[7] | at[8] | at[9]
        direct = not bits % _ALIGNED_BYTES
        if plan.append is not None:
            plan.append(stream, (*tensors[1:5], lengths, block_table), (*at[1:5], *at[8:]) if direct else None)
        plan.attend(stream, tensors, at if direct else None)
        if plan.combine is not None:
            plan.combine(stream, (parts, sums, out, lengths), (at[6], at[7], at[5], at[8]) if direct else None)
        return out

    def _parts(self, q: Tensor, stream: int, size_bytes: int) -> tuple[Tensor, Tensor]:
        """Return the scratch for parts of results and for their sums: as large as any launch of this head size needs,
        so that it never moves."""
        key = (q.device, stream, size_bytes)
        found = self._scratch.get(key)
        if found is None:
            memory = torch.empty(size_bytes // 4, dtype=torch.float32, device=q.device)
            rows = len(memory) // (q.shape[-1] + 1)
            found = self._scratch[key] = memory[: rows * q.shape[-1]], memory[rows * q.shape[-1] :]
        return found

    def _plan(
        self,
        call: CallShape,
        q: Tensor,
        k_new: Tensor | None,
        v_new: Tensor | None,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> _Plan:
        """Decide how calls of these shapes are launched. Raises ValueError for what the kernels do not take."""
        if q.dtype not in (torch.float16, torch.bfloat16) or call.head_dim > 256:
            raise ValueError(f"heads of {call.head_dim} {q.dtype}: the Triton kernel takes up to 256 of half precision")
        if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
            raise ValueError("the last dimension of k_pages and v_pages must be dense")
        if self._codes is not None and k_new is not None:
            raise ValueError("the Triton kernel appends no codes")
        gpu, rows = gpu_of(q.device), call.q_len * call.group
        tile = tile_for(rows, call.head_dim, gpu.capability)
        programs = -(-rows // tile.block_m) * call.batch * call.kv_heads
        reach = min(call.max_tokens, window + call.q_len) if window else call.max_tokens
        splits = split_count(programs, reach, gpu) if programs else 1
        added = 0 if k_new is None else call.q_len
        # One block of rows has all new keys; with several, some would need keys that another one writes.
        fused = k_new is not None and rows <= tile.block_m
        block_d = max(16, power_of_two(call.head_dim))
        new_heads = [0 if each is None else _row_heads(each) for each in (k_new, v_new)]
        strides = dict(zip(("k_page", "k_token", "k_head"), k_pages.stride()[:3], strict=True))
        strides |= dict(zip(("v_page", "v_token", "v_head"), v_pages.stride()[:3], strict=True))
        sizes = {"kv_heads": call.kv_heads, "head_dim": call.head_dim, "page_tokens": call.page_tokens}
        reads = {"window": window, "min_blocks": MIN_SPLIT_TOKENS // tile.block_n, "block_n": tile.block_n}
        append = attend = combine = None
        if k_new is not None and not fused and programs:
            constants = strides | sizes | {"block_h": power_of_two(call.kv_heads), "block_d": block_d}
            grid, numbers = (call.batch * call.q_len, 1), (block_table.stride(0), call.q_len, *new_heads)
            append = self._prepare(triton_kernels.append_kernel, grid, numbers, constants, q)
        if programs:
            constants = {**strides, **sizes, **reads}
            codes = self._codes
            constants |= {"bits": codes.bits if codes else 16, "code_group": codes.group if codes else 0}
            constants |= {"group": call.group, "capped": bool(softcap), "append": fused}
            constants |= {"upcast": q.dtype == torch.bfloat16 and is_interpreted(triton_kernels.attend_kernel)}
            constants |= {"block_m": tile.block_m, "block_d": block_d}
            constants |= {"block_t": max(16, power_of_two(tile.block_m // call.group)) if fused else 0}
            constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
            heads = _row_heads(q), *new_heads
            counts = (block_table.stride(0), call.q_len, added, splits, *heads)
            attend = self._prepare(
                triton_kernels.attend_kernel, (programs, splits), (*counts, *_factors(scale, softcap)), constants, q
            )
        if splits > 1:
            constants = {"heads": call.heads, "head_dim": call.head_dim, **reads}
            constants |= {"block_s": MAX_SPLITS, "block_d": block_d}
            grid, numbers = (call.batch * call.q_len * call.heads, 1), (call.q_len, added, splits)
            combine = self._prepare(triton_kernels.combine_kernel, grid, numbers, constants, q)
        return _Plan(
            out_shape=q.shape,
            append=append,
            attend=attend,
            combine=combine,
            unsplit=torch.empty(0, dtype=torch.float32, device=q.device),
            parts_bytes=split_keys_bytes(call.head_dim, gpu.processors, turing=gpu.capability < (8, 0)),
            device_index=q.device.index or 0,
            current_stream=_no_stream if is_interpreted(triton_kernels.attend_kernel) else current_stream(),
            guarded=q.device.type == "cuda" and torch.cuda.device_count() > 1,
        )

    def _prepare(
        self,
        function: Any,
        grid: tuple[int, int],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
        q: Tensor,
    ) -> _Launch:
        """Return the launch of a kernel, compiled and loaded; the kernel is not specialised for its `numbers`."""
        key = (function, q.dtype, q.device, tuple(constants.items()))
        kernel = self._variants.get(key)
        if kernel is None:
            stored = q.dtype if self._codes is None else torch.int8
            kinds = {**_TENSOR_KINDS, "k_pages": stored, "v_pages": stored}
            names = function.arg_names
            tensors = names[: len(names) - len(numbers) - sum(name in constants for name in names)]
            dtypes = [kinds.get(name, q.dtype) for name in tensors]
            kernel = self._variants[key] = Kernel(function, q.device, dtypes, constants, varying=numbers)
        return partial(kernel.launch, grid, numbers)


_Launch = Callable[[int, Sequence[Tensor], Sequence[int] | None], None]
"""A launch on a stream, of the tensors and their addresses, see `Kernel.launch`."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How calls of one shape are launched. attend: None where there is nothing to compute.  append: None where `attend`
    does it.  combine: None where no sequence has more than one part.  unsplit: stands for the scratch then.
    parts_bytes: of the scratch.  guarded: another device may be the current one."""

    out_shape: torch.Size
    append: _Launch | None
    attend: _Launch | None
    combine: _Launch | None
    unsplit: Tensor
    parts_bytes: int
    device_index: int
    current_stream: Callable[[int], int]
    guarded: bool


_TENSOR_KINDS = {
    "lengths": torch.int32,
    "block_table": torch.int32,
    "parts": torch.float32,
    "part_sums": torch.float32,
}


def _no_stream(_device: int) -> int:
    return 0


def _row_heads(rows: Tensor) -> int:
    """Return the heads from one row of [B, n, heads, D] to the next, of one sequence or of two."""
    return rows.stride(1 if rows.shape[1] > 1 else 0) // rows.shape[3]


def _dense_rows(rows: Tensor) -> Tensor:
    """Return [B, n, heads, D] as one run of rows, of dense heads; itself where it is so."""
    batch, count, heads, size = rows.shape
    of_sequence, of_row, of_head, of_element = rows.stride()
    one_run = batch == 1 or count == 1 or of_sequence == count * of_row
    whole = (of_sequence if count == 1 else of_row) % size == 0 or batch * count == 1
    is_dense = one_run and whole and (of_head == size or heads == 1) and of_element == 1
    return rows if is_dense else rows.contiguous()


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return the factors of scores before and after the soft-cap, for powers of two."""
    if softcap:
        return 2 * _LOG2_E * scale / softcap, _LOG2_E * softcap
    return _LOG2_E * scale, 1.0
