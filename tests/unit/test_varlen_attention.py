"""Paged attention over sequences with different numbers of new tokens gives in one call what attention by definition
gives. The Triton kernels run in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import inspect
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.paged_attention import gathered, varlen
from engine.backends.paged_attention.choose import ImplementationName
from engine.backends.paged_attention.interface import PREPARED_ROWS, implementation, varlen_chunks
from engine.backends.torch.kv.codec import HeadCodec
from engine.config import CacheBits
from tests.fakes.paged import Case, VarlenCall, same_bits

pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES = [
    (Case("a prompt beside decodes", (0, 15, 40, 0)), (1, 1, 1, 41)),
    (Case("two chunks of one length", (3, 20, 0)), (1, 9, 9)),
    (Case("chunks of many lengths, over large pages", (250, 0, 255, 30), page_tokens=256), (2, 3, 5, 60)),
    (Case("a chunk of many blocks of rows", (300, 100), heads=4, kv_heads=1), (1, 100)),
    (Case("no shared keys", (30, 5, 0), heads=4, kv_heads=4), (1, 2, 33)),
    (Case("seven heads on a key", (5, 33), heads=14, kv_heads=2), (1, 19)),
    (Case("head of 96", (20, 3), head_dim=96), (1, 20)),
    (Case("head of 128", (290, 3), head_dim=128, page_tokens=256), (1, 33)),
    (Case("head of 256", (40, 3), head_dim=256), (1, 17)),
    (Case("head of 80 in pages of an odd size", (40, 3), head_dim=80, page_tokens=12), (1, 8)),
    (Case("a window over pages", (300, 20, 0), window=130), (1, 1, 40)),
    (Case("a window of one", (30, 20), window=1), (1, 9)),
    (Case("soft-cap", (40, 9), softcap=2.0), (1, 9)),
    (Case("a long decode in parts", (5, 1500, 0), heads=2, kv_heads=1), (1, 1, 20)),
    (Case("a long chunk in parts", (3, 1400), heads=2, kv_heads=1), (1, 50)),
    (Case("parts beyond a window, capped", (1500, 700), heads=2, kv_heads=1, window=300, softcap=9.0), (1, 20)),
]
IDS = [case.name for case, _ in CASES]


def prove(name: ImplementationName, case: Case, q_lens: tuple[int, ...], dtype: torch.dtype) -> None:
    call = VarlenCall(case, q_lens, dtype, DEVICE)
    before = call.pool.clone()
    found = call.run(implementation(name, devices=[torch.device(DEVICE)]))
    assert found.shape == call.q.shape and found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert same_bits(call.pool, before)


@pytest.mark.parametrize(("case", "q_lens"), CASES, ids=IDS)
def test_the_triton_kernel_gives_attention_by_definition(case: Case, q_lens: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    prove("triton", case, q_lens, torch.float16)


@pytest.mark.parametrize(("case", "q_lens"), [CASES[0], CASES[7], CASES[10], CASES[13]], ids=str)
def test_the_triton_kernel_takes_bfloat16(case: Case, q_lens: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    prove("triton", case, q_lens, torch.bfloat16)


@pytest.mark.parametrize(("case", "q_lens"), CASES[:6] + CASES[10:], ids=str)
def test_gathered_pages_give_attention_by_definition(case: Case, q_lens: tuple[int, ...]) -> None:
    prove("gathered", case, q_lens, torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("case", "q_lens"), [CASES[0], CASES[5], CASES[10], CASES[13]], ids=str)
def test_codes_are_attended_to_as_their_decoded_pages(case: Case, q_lens: tuple[int, ...], bits: CacheBits) -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import TritonAttention

    call = VarlenCall(case, q_lens, torch.float16, DEVICE)
    heads = HeadFormat(case.head_dim, bits, 2)
    codec = HeadCodec(heads, [torch.device(DEVICE)])
    codes = codec.encode(call.pool).view(torch.int8)
    decoded = codec.decode(codes.view(torch.uint8), torch.empty_like(call.pool))
    found, expected = call.run(TritonAttention(heads), codes), call.run(TritonAttention(), decoded)
    assert torch.isfinite(found).all() and torch.equal(found, expected)


def test_pages_may_lie_further_out_than_32_bits_count_elements() -> None:
    pytest.importorskip("triton")
    call = VarlenCall(*CASES[2], torch.float16, DEVICE)
    first = 2**31 // call.pool[0].numel()
    shape = (first + len(call.pool), *call.pool.shape[1:])
    pool = torch.empty(shape, dtype=torch.float16, device=DEVICE)  # takes memory where it is written
    pool[first:] = call.pool
    call.table += first
    found = call.run(implementation("triton", devices=[torch.device(DEVICE)]), pool)
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=4e-3, rtol=4e-3)


@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 40_000)), min_size=1, max_size=12),
    st.sampled_from([(32, 8, 128), (14, 2, 64), (8, 8, 256), (64, 1, 128)]),
)
def test_items_cover_every_row_and_key_once_and_parts_lie_apart(
    sizes: list[tuple[int, int]], counts: tuple[int, int, int]
) -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import MAX_SPLITS, TritonAttention, tile_for

    heads, kv_heads, head_dim = counts
    group, q_lens = heads // kv_heads, sorted(q_len for q_len, _ in sizes)
    lengths = [q_len + before for q_len, (_, before) in zip(q_lens, sizes, strict=True)]
    work = TritonAttention().schedule(q_lens, lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    tile, decode_m = (tile_for(rows * group, head_dim, (9, 0)) for rows in (max(q_lens), 1))
    merges = {tuple(each[:2]): each[2:] for each in work.merges.tolist()}
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, row_block, first, number, slot in work.items.tolist():
        covered.setdefault((sequence, row_block), []).append((first, number, slot))
    slots: list[tuple[int, int]] = []
    for sequence, (q_len, total) in enumerate(zip(q_lens, lengths, strict=True)):
        rows = decode_m.block_m if q_len == 1 else tile.block_m
        for row_block in range(-(-q_len * group // rows)):
            items = sorted(covered.pop((sequence, row_block)))
            last = min(((row_block + 1) * rows - 1) // group, q_len - 1)
            ends = list(itertools.accumulate([number for _, number, _ in items], initial=0))
            assert [first for first, _, _ in items] == ends[:-1] and min(number for _, number, _ in items) > 0
            assert ends[-1] == -(-(total - q_len + last + 1) // tile.block_n)
            if len(items) == 1:
                assert items[0][2] == -1 and (sequence, row_block) not in merges
                continue
            assert merges[sequence, row_block] == [items[0][2], len(items)] and len(items) <= MAX_SPLITS
            assert [slot - items[0][2] for _, _, slot in items] == [
                part * kv_heads * rows for part in range(len(items))
            ]
            slots.append((items[0][2], items[0][2] + len(items) * kv_heads * rows))
    assert not covered and len(slots) == len(merges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(slots)))
    assert work.part_rows == sum(end - start for start, end in slots)
    assert work.part_rows <= 132 * 2 * tile.block_m, "scratch does not grow with a step"
    assert np.all(np.diff(work.items[:, 3].numpy()) <= 0), "the largest items come first"


def test_a_long_context_beside_a_prompt_is_split_and_the_prompt_is_not() -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import TritonAttention

    work = TritonAttention().schedule((1, 1, 40, 2000), (900, 30_000, 30_000, 2000), heads=32, kv_heads=8, head_dim=128)
    assert {sequence for sequence, *_ in work.merges.tolist()} == {1, 2}
    assert int(work.items[:, 3].max()) <= 2 * int(work.items[:, 3].sum()) * 8 / 264


def test_no_step_needs_a_kernel_that_was_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from engine.backends.paged_attention.triton_attention import TritonAttention

    heads, kv_heads, head_dim, windows = 4, 1, 16, (None, 100)
    rows = torch.zeros(900, heads + 2 * kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
    pages = torch.zeros(4, 16, 2 * kv_heads, head_dim, dtype=torch.float16, device=DEVICE).chunk(2, dim=2)
    attention = TritonAttention()
    attention.prepare(
        *(rows[:PREPARED_ROWS, :heads], None, None, *pages),
        windows=windows,
        softcap=0.0,
        varlen=True,
        report=lambda done, total: None,
    )
    prepared = attention.variants
    monkeypatch.setattr(TritonAttention, "_launch_chunks", lambda *_: rows[:0])  # decided, and not computed
    for longest, decodes, width, window in itertools.product((*range(2, 140), 800), (0, 1, 9), (60, 9000), windows):
        q_lens = (*[1] * decodes, longest)
        lengths = [width * 16] * len(q_lens)
        counts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        chunks = varlen_chunks(attention, q_lens, lengths, **counts, device=torch.device(DEVICE))
        table = torch.zeros(len(q_lens), width, dtype=torch.int32, device=DEVICE)
        totals = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        attention(
            rows[: sum(q_lens), :heads], None, None, *pages, totals, table, scale=0.3, window=window, chunks=chunks
        )
    assert [dict(each[3]) for each in attention.variants - prepared] == []  # type: ignore[index]


def by_definition(q: Tensor, k_pages: Tensor, v_pages: Tensor, asked: dict[str, Any], call: VarlenCall) -> Tensor:
    """What flash-attn's kernels compute for sequences that `cu_seqlens` describe."""
    assert asked["starts"].tolist() == [0, *itertools.accumulate(call.q_lens)]
    assert asked["key_starts"].diff().tolist() == call.totals
    assert (asked["max_q"], asked["max_k"]) == (max(call.q_lens), call.table.shape[1] * call.case.page_tokens)
    assert asked["window"] == (-1 if call.case.window is None else call.case.window - 1, 0) or (
        call.case.window is None and asked["window"] == (-1, -1)
    )
    return call.run(gathered.paged_attention)


LARGE_PAGES = (Case("large pages, in a window", (250, 0, 255, 30), page_tokens=256, window=90), (1, 3, 3, 60))


def test_varlen_attn_is_asked_for_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real, call = inspect.signature(varlen.varlen_attn), VarlenCall(*LARGE_PAGES, torch.float16)

    def stand_in(*arguments: Any, **named: Any) -> Tensor:
        given = real.bind(*arguments, **named).arguments
        assert given["seqused_k"].tolist() == call.totals and given["enable_gqa"]
        names = {"starts": "cu_seq_q", "key_starts": "cu_seq_k", "max_q": "max_q", "max_k": "max_k"}
        asked = {ours: given[theirs] for ours, theirs in names.items()} | {"window": given["window_size"]}
        return by_definition(given["query"], given["key"], given["value"], asked, call)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    found = call.run(varlen.paged_attention)
    torch.testing.assert_close(found.double(), call.expected(), atol=4e-3, rtol=4e-3)


def test_flash_attn_is_asked_for_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    call = VarlenCall(*LARGE_PAGES, torch.float16)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: Tensor,
    ) -> Tensor:
        assert causal and block_table is call.table
        asked = {"starts": cu_seqlens_q, "key_starts": cu_seqlens_k, "max_q": max_seqlen_q, "max_k": max_seqlen_k}
        return by_definition(q, k, v, asked | {"window": window_size}, call)

    library = ModuleType("flash_attn")
    library.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    library.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.delitem(sys.modules, "engine.backends.paged_attention.flash", raising=False)
    monkeypatch.delattr("engine.backends.paged_attention.flash", raising=False)
    found = call.run(implementation("flash"))
    torch.testing.assert_close(found.double(), call.expected(), atol=4e-3, rtol=4e-3)
    del sys.modules["engine.backends.paged_attention.flash"]


def test_chunks_without_their_work_are_refused() -> None:
    pytest.importorskip("triton")
    call, attention = VarlenCall(*CASES[0], torch.float16), implementation("triton")
    chunks = varlen_chunks(
        gathered.paged_attention, call.q_lens, call.totals, heads=4, kv_heads=2, head_dim=64, device=torch.device("cpu")
    )
    lengths = torch.tensor(call.totals, dtype=torch.int32)
    with pytest.raises(ValueError, match="need the work of chunks"):
        attention(call.q, None, None, *call.pool.chunk(2, dim=2), lengths, call.table, scale=1.0, chunks=chunks)
