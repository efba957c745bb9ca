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

import numpy as np
import torch
from torch import Tensor

from engine.backends.common.kv_format import ApartCodes, HeadFormat
from engine.backends.common.step_memory import SPLIT_PROGRAMS, max_query_block, split_keys_bytes
from engine.backends.paged_attention import triton_kernels, triton_varlen_kernels
from engine.backends.paged_attention.interface import CallShape, VarlenChunks, VarlenWork
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
    devices: on which it will compute; the work of calls with `chunks` is cut up for the weakest.

    Keeps a plan for every shape of call, and for each stream a scratch of fixed size and place, so that CUDA graphs may
    hold its address.
    """

    def __init__(self, heads: HeadFormat | None = None, devices: Sequence[torch.device] = ()) -> None:
        self._codes = heads if heads is not None and heads.is_quantised else None
        gpus = [gpu_of(device) for device in devices or [torch.device("cpu")]]
        self._weakest = Gpu(min(gpu.processors for gpu in gpus), min(gpu.capability for gpu in gpus))
        self._plans: dict[Hashable, _Plan] = {}
        self._varlen_plans: dict[Hashable, _VarlenPlan] = {}
        self._variants: dict[Hashable, Kernel] = {}
        self._appends: dict[Hashable, Kernel] = {}
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
        chunks: VarlenChunks | None = None,
    ) -> Tensor:
        """See `interface.PagedAttention`."""
        if chunks is not None:
            return self._attend_chunks(q, k_pages, v_pages, lengths, block_table, scale, window or 0, softcap, chunks)
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
                plan = self._plan(
                    *(call, q, k_new, v_new, k_pages, v_pages, block_table, scale, window or 0, softcap),
                    codes=self._codes,
                    added=0 if k_new is None else call.q_len,
                )
            self._plans[key] = plan
        if k_new is None or v_new is None:
            k_new = v_new = q  # never read
        return self._launch_guarded(plan, q, k_new, v_new, k_pages, v_pages, lengths, block_table)

    def attend_apart(
        self,
        q: Tensor,
        codes: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        lengths: Tensor,
        block_table: Tensor,
        *,
        form: ApartCodes,
        added: int,
        scale: float,
        window: int | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attend with q [B, q_len, Hq, D] over pages of codes in `form`, those of the new tokens among them: as a call
        without new keys, but that `lengths` lacks the `added` last tokens, 0 or q_len.

        codes: of keys and values, int8 [P, page_tokens, Hkv, D * bits / 8].  scales: float16 [P, page_tokens, Hkv,
        D / 32], of both.  q must be rotated as keys are, and the result is, as values are; of codes of 4 bits, the
        kernel's element i is 2 i, and D / 2 + i is 2 i + 1.
        Raises ValueError where shapes or dtypes do not go together.
        """
        (k_codes, v_codes), options = codes, (form, added, scale, window, softcap)
        key = (q.shape, q.stride(), q.dtype, q.device, k_codes.shape, block_table.shape, block_table.stride(), options)
        plan = self._plans.get(key)
        if plan is None:
            call = CallShape.of(q, None, None, k_codes, block_table, form)
            dense = (q, *codes, *scales)
            if not all(each.is_contiguous() for each in dense) or block_table.stride(1) != 1:
                raise ValueError("queries, codes and their scales must be dense")
            with torch.cuda.device_of(q):
                plan = self._plan(
                    *(call, q, None, None, k_codes, v_codes, block_table, scale, window or 0, softcap),
                    codes=form,
                    added=added,
                )
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return self._launch_guarded(plan, q, *scales, k_codes, v_codes, lengths, block_table)

    def append(
        self, k_new: Tensor, v_new: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor, block_table: Tensor
    ) -> None:
        """Write new keys and values into their pages, and no more; see `interface.PagedAttention`."""
        k_new, v_new = _dense_rows(k_new), _dense_rows(v_new)
        batch, q_len, kv_heads, head_dim = k_new.shape
        numbers = (block_table.stride(0), q_len, _row_heads(k_new), _row_heads(v_new))
        key = (kv_heads, head_dim, k_new.dtype, k_new.device, k_pages.shape[1], k_pages.stride(), v_pages.stride())
        kernel = self._appends.get(key)
        if kernel is None:
            constants = _page_strides(k_pages, v_pages) | {"kv_heads": kv_heads, "head_dim": head_dim}
            constants |= {"page_tokens": k_pages.shape[1]} | _append_blocks(kv_heads, head_dim)
            kernel = self._appends[key] = self._kernel(triton_kernels.append_kernel, numbers, constants, k_new)
        kernel((batch * q_len, 1), k_new, v_new, k_pages, v_pages, lengths, block_table, varying=numbers)

    def _launch_guarded(
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
        varlen: bool,
        report: Callable[[int, int], None],
    ) -> None:
        """See `interface.CompiledAttention`. Which kernels a call needs depends on its rows alone, and on whether its
        block table is so wide that keys are split."""
        heads, head_dim, page_tokens, kv_heads = q.shape[1], q.shape[2], k_pages.shape[1], k_pages.shape[2]
        group, capability = heads // kv_heads, (self._weakest if varlen else gpu_of(q.device)).capability
        blocks = {tokens: tile_for(tokens * group, head_dim, capability).block_m for tokens in range(1, len(q) + 1)}
        # The fewest tokens of each size of block, and of several blocks, for which appending is a kernel of its own.
        first = {(block, tokens * group > block): tokens for tokens, block in reversed(blocks.items())}
        if varlen:  # the fewest of each size, but for one token, which is a decode
            first = {(block, False): tokens for tokens, block in reversed(blocks.items()) if tokens > 1}
            first[0, False] = 1
        calls = [(window, tokens) for window in windows for tokens in sorted(first.values())]
        table = torch.zeros(1, -(-_PREPARED_WIDTH // page_tokens), dtype=torch.int32, device=q.device)
        for done, (window, tokens) in enumerate(calls):
            report(done, len(calls))
            options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
            lengths = torch.full((1,), 0 if k_new is not None else tokens, dtype=torch.int32, device=q.device)
            if varlen and tokens > 1:
                parts = [(0, 0, part, 1, part * kv_heads * blocks[tokens]) for part in range(2)]
                tables = (parts, [(0, 0, 0, 2)], [0, tokens])
                items, merges, starts = (torch.tensor(each, dtype=torch.int32, device=q.device) for each in tables)
                work = VarlenWork(items, merges, 2 * kv_heads * blocks[tokens])
                options["chunks"] = VarlenChunks((tokens,), starts, starts, work)
                self(q[:tokens], None, None, k_pages, v_pages, lengths, table, **options)
                continue
            rows = [None if each is None else each[:tokens].unflatten(0, (1, tokens)) for each in (q, k_new, v_new)]
            self(rows[0], rows[1], rows[2], k_pages, v_pages, lengths, table, **options)  # type: ignore[arg-type]
        report(len(calls), len(calls))

    def schedule(
        self, q_lens: Sequence[int], lengths: Sequence[int], *, heads: int, kv_heads: int, head_dim: int
    ) -> VarlenWork:
        """See `interface.CompiledAttention`: the items and merges of `triton_varlen_kernels`.

        Items with more than twice an even share of all blocks of keys are split (flash-decoding, Dao et al. 2023); the
        largest come first, so that none is long at the end.
        """
        group = heads // kv_heads
        tile, decode_m = self._tiles(max(q_lens), group, head_dim)
        tokens, totals = np.array(q_lens), np.array(lengths)
        block_m = np.where(tokens == 1, decode_m, tile.block_m)
        counts = -(-tokens * group // block_m)
        sequence = np.repeat(np.arange(len(tokens)), counts)
        row_block = np.arange(len(sequence)) - np.repeat(counts.cumsum() - counts, counts)
        tokens, totals, block_m = tokens[sequence], totals[sequence], block_m[sequence]
        seen = totals - tokens + np.minimum(((row_block + 1) * block_m - 1) // group, tokens - 1) + 1
        blocks = -(-seen // tile.block_n)
        share = -(-int(blocks.sum()) * kv_heads // (self._weakest.processors * SPLIT_PROGRAMS))
        parts = np.clip(blocks // max(share, MIN_SPLIT_TOKENS // tile.block_n), 1, MAX_SPLITS)
        per_part = -(-blocks // parts)
        parts = -(-blocks // per_part)
        rows = np.where(parts > 1, parts * kv_heads * block_m, 0)
        slot = rows.cumsum() - rows
        merges = np.stack((sequence, row_block, slot, parts), 1)[parts > 1]
        tiles = np.repeat(np.arange(len(sequence)), parts)
        part = np.arange(len(tiles)) - np.repeat(parts.cumsum() - parts, parts)
        first = part * per_part[tiles]
        own_slot = np.where(parts[tiles] > 1, slot[tiles] + part * kv_heads * block_m[tiles], -1)
        number = np.minimum(per_part[tiles], blocks[tiles] - first)
        items = np.stack((sequence[tiles], row_block[tiles], first, number, own_slot), 1)
        items = items[np.argsort(-number, kind="stable")]
        tables = [torch.from_numpy(each.astype(np.int32)) for each in (items, merges)]
        return VarlenWork(tables[0], tables[1], int(rows.sum()))

    def _tiles(self, max_tokens: int, group: int, head_dim: int) -> tuple[Tile, int]:
        """Return the tile of chunks of up to `max_tokens`, and the rows of a decode's block."""
        capability = self._weakest.capability
        return tile_for(max_tokens * group, head_dim, capability), tile_for(group, head_dim, capability).block_m

    def _attend_chunks(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        scale: float,
        window: int,
        softcap: float,
        chunks: VarlenChunks,
    ) -> Tensor:
        work = chunks.work
        if work is None:
            raise ValueError("the Triton kernels need the work of chunks from `schedule`")
        if q.stride()[1:] != (q.shape[2], 1) or q.stride(0) % q.shape[2]:
            q = q.contiguous()
        key = (
            *(q.shape[1:], q.stride(), q.dtype, q.device, k_pages.shape, k_pages.stride(), v_pages.stride()),
            *(block_table.stride(), max(chunks.q_lens), scale, window, softcap),
        )
        plan = self._varlen_plans.get(key)
        if plan is None:
            if len(self._varlen_plans) >= _MAX_PLANS:
                self._varlen_plans.clear()
            with torch.cuda.device_of(q):  # where its kernels are loaded
                plan = self._plan_chunks(max(chunks.q_lens), q, k_pages, v_pages, block_table, scale, window, softcap)
            self._varlen_plans[key] = plan
        return self._launch_chunks(plan, q, k_pages, v_pages, lengths, block_table, chunks.starts, work)

    def _launch_chunks(
        self,
        plan: _VarlenPlan,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        starts: Tensor,
        work: VarlenWork,
    ) -> Tensor:
        kv_heads, head_dim = k_pages.shape[2], q.shape[2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = torch.empty((work.part_rows, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty(work.part_rows, dtype=torch.float32, device=q.device)
        tensors = (q, k_pages, v_pages, out, parts, sums, starts, lengths, block_table, work.items)
        plan.attend((kv_heads * len(work.items), 1), *tensors, varying=plan.numbers)
        if work.part_rows:
            plan.combine((kv_heads * len(work.merges), plan.max_rows), parts, sums, out, starts, work.merges)
        return out

    def _plan_chunks(
        self,
        max_tokens: int,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> _VarlenPlan:
        """Decide how calls of chunks of up to `max_tokens` are launched. Raises ValueError as `_plan` does."""
        CallShape.of(q[None], None, None, k_pages, block_table[:1], self._codes)
        _refuse_heads(q)
        kv_heads, head_dim, codes = k_pages.shape[2], q.shape[2], self._codes
        group = q.shape[1] // kv_heads
        tile, decode_m = self._tiles(max_tokens, group, head_dim)
        rows = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "decode_m": decode_m}
        rows |= {"block_m": tile.block_m, "block_d": max(16, power_of_two(head_dim))}
        constants = {**_page_strides(k_pages, v_pages), **rows, "page_tokens": k_pages.shape[1], "window": window}
        constants |= {"bits": codes.bits if codes else 16, "code_group": codes.group if codes else 0}
        constants |= {"capped": bool(softcap), "block_n": tile.block_n}
        constants |= {"upcast": q.dtype == torch.bfloat16 and is_interpreted(triton_varlen_kernels.varlen_kernel)}
        constants |= {"num_warps": tile.warps, "num_stages": tile.stages}
        numbers = (block_table.stride(0), q.stride(0) // head_dim, *_factors(scale, softcap))
        rows["block_s"] = MAX_SPLITS
        return _VarlenPlan(
            attend=self._kernel(triton_varlen_kernels.varlen_kernel, numbers, constants, q),
            numbers=numbers,
            combine=self._kernel(triton_varlen_kernels.varlen_combine_kernel, (), rows, q),
            max_rows=max(tile.block_m, decode_m),
        )

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
        *,
        codes: HeadFormat | ApartCodes | None,
        added: int,
    ) -> _Plan:
        """Decide how calls of these shapes are launched. added: tokens of each sequence that lengths lack. Raises
        ValueError for what the kernels do not take."""
        _refuse_heads(q)
        if codes is not None and k_new is not None:
            raise ValueError("the Triton kernel appends no codes")
        gpu, rows = gpu_of(q.device), call.q_len * call.group
        tile = tile_for(rows, call.head_dim, gpu.capability)
        programs = -(-rows // tile.block_m) * call.batch * call.kv_heads
        # A block's rows see no more. So no longer call has more parts than those that `prepare` makes.
        block_tokens = min(call.q_len, -(-tile.block_m // call.group))
        reach = min(call.max_tokens, window + block_tokens) if window else call.max_tokens
        splits = split_count(programs, reach, gpu) if programs else 1
        # One block of rows has all new keys; with several, some would need keys that another one writes.
        fused = k_new is not None and rows <= tile.block_m
        block_d = max(16, power_of_two(call.head_dim))
        new_heads = [0 if each is None else _row_heads(each) for each in (k_new, v_new)]
        strides = _page_strides(k_pages, v_pages)
        sizes = {"kv_heads": call.kv_heads, "head_dim": call.head_dim, "page_tokens": call.page_tokens}
        reads = {"window": window, "min_blocks": MIN_SPLIT_TOKENS // tile.block_n, "block_n": tile.block_n}
        append = attend = combine = None
        if k_new is not None and not fused and programs:
            constants = strides | sizes | _append_blocks(call.kv_heads, call.head_dim)
            grid, numbers = (call.batch * call.q_len, 1), (block_table.stride(0), call.q_len, *new_heads)
            append = self._prepare(triton_kernels.append_kernel, grid, numbers, constants, q)
        if programs:
            constants = {**strides, **sizes, **reads}
            constants |= {"bits": codes.bits if codes else 16, "code_group": codes.group if codes else 0}
            apart = isinstance(codes, ApartCodes)
            constants |= {
                "v_bits": codes.v_bits if isinstance(codes, ApartCodes) else constants["bits"],
                "apart": apart,
            }
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
        return partial(self._kernel(function, numbers, constants, q).launch, grid, numbers)

    def _kernel(
        self, function: Any, numbers: tuple[int | float, ...], constants: Mapping[str, Any], q: Tensor
    ) -> Kernel:
        key = (function, q.dtype, q.device, tuple(constants.items()))
        kernel = self._variants.get(key)
        if kernel is None:
            stored = q.dtype if constants.get("bits", 16) == 16 else torch.int8
            kinds = {**_TENSOR_KINDS, "k_pages": stored, "v_pages": stored}
            names = function.arg_names
            tensors = names[: len(names) - len(numbers) - sum(name in constants for name in names)]
            dtypes = [kinds.get(name, q.dtype) for name in tensors]
            kernel = self._variants[key] = Kernel(function, q.device, dtypes, constants, varying=numbers)
        return kernel


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


@dataclass(frozen=True, slots=True)
class _VarlenPlan:
    """How calls with chunks are launched. numbers: of `attend`.  max_rows: of a block."""

    attend: Kernel
    numbers: tuple[int | float, ...]
    combine: Kernel
    max_rows: int


_TENSOR_KINDS = {
    **dict.fromkeys(("lengths", "block_table", "starts", "items", "merges"), torch.int32),
    **dict.fromkeys(("parts", "part_sums"), torch.float32),
}


def _no_stream(_device: int) -> int:
    return 0


def _refuse_heads(q: Tensor) -> None:
    """Raise ValueError for heads that the kernels do not take."""
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > 256:
        raise ValueError(f"heads of {q.shape[-1]} {q.dtype}: the Triton kernel takes up to 256 of half precision")


def _page_strides(k_pages: Tensor, v_pages: Tensor) -> dict[str, int]:
    """Return the strides of pages by the names that kernels give them. Raises ValueError where heads are not dense."""
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise ValueError("the last dimension of k_pages and v_pages must be dense")
    names = ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")
    return dict(zip(names, (*k_pages.stride()[:3], *v_pages.stride()[:3]), strict=True))


def _append_blocks(kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the sizes of what a program of `append_kernel` copies."""
    return {"block_h": power_of_two(kv_heads), "block_d": max(16, power_of_two(head_dim))}


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
