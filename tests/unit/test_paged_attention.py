"""Paged attention gives what attention by definition gives, whoever computes it, and writes where it should alone.

The Triton kernels run in Triton's interpreter, or on the GPU where there is one.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.step_memory import split_keys_bytes
from engine.backends.paged_attention import gathered, varlen
from engine.backends.paged_attention.choose import ImplementationName
from engine.backends.paged_attention.interface import PREPARED_ROWS, implementation
from engine.backends.paged_attention.triton_attention import MAX_SPLITS, TritonAttention
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.triton_launch import gpu_of
from engine.config import CacheBits
from tests.fakes.paged import Call, Case, same_bits

pytestmark = pytest.mark.long

EDGES = (0, 1, 255, 256, 257)
CASES = [
    Case("decode at the edges of large pages", EDGES, page_tokens=256),
    Case("decode at the edges of small pages", (0, 1, 15, 16, 17, 47, 48)),
    Case("decode over keys that lie in the pages", EDGES, page_tokens=256, given=False),
    Case("draft over mixed lengths", (0, 1, 14, 40), q_len=5),
    Case("draft over large pages, in place", (250, 255, 600), q_len=8, page_tokens=256, given=False),
    Case("prompt from nothing", (0, 0), q_len=41),
    Case("chunk across pages", (13, 100), q_len=33, heads=3, kv_heads=1),
    Case("chunk of many rows", (30,), q_len=90, heads=4, kv_heads=2),
    Case("no shared keys", (5, 33), heads=4, kv_heads=4, q_len=2),
    Case("four heads on a key", (5, 33), heads=8, kv_heads=2, q_len=3),
    Case("seven heads on a key", (5, 33), heads=14, kv_heads=2, q_len=3),
    Case("eight heads on a key", (5, 33), heads=8, kv_heads=1),
    Case("head of 80", (3, 20), head_dim=80, q_len=2),
    Case("head of 96", (3, 20), head_dim=96),
    Case("head of 128", (3, 290), head_dim=128, page_tokens=256),
    Case("head of 256", (3, 40), head_dim=256, q_len=17),
    Case("head of 8", (3, 40), head_dim=8),
    Case("keys and values in tensors of their own", (3, 40), q_len=2, strided=False),
    Case("pages of an odd size", (3, 40), q_len=2, page_tokens=12),
    Case("window of one", (0, 40), window=1, q_len=3),
    Case("window within a page", (0, 4, 40), window=7),
    Case("window over pages", (300, 20), window=130, q_len=40),
    Case("soft-cap", (0, 40), q_len=9, softcap=2.0),
    Case("soft-cap and window", (100,), q_len=3, softcap=30.0, window=64, page_tokens=256),
    Case("long context in parts", (1500, 3, 0), heads=2, kv_heads=1, page_tokens=256),
    Case("long context in parts, drafted, capped", (1030,), heads=2, kv_heads=1, q_len=4, softcap=5.0),
    Case("long window in parts", (1500, 3), heads=2, kv_heads=1, page_tokens=256, window=900),
]
IDS = [case.name for case in CASES]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prove(name: ImplementationName, case: Case, dtype: torch.dtype) -> None:
    """Right results, the new tokens in their pages, and every other bit as it was."""
    if name == "triton":
        pytest.importorskip("triton")
    call = Call(case, dtype, DEVICE)
    pool = call.expected_pool()
    found = call.run(implementation(name))
    assert found.shape == call.q.shape and found.dtype == dtype and found.is_contiguous()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=tolerance, rtol=tolerance)
    assert same_bits(call.pool, pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gathered_pages_give_attention_by_definition(case: Case, dtype: torch.dtype) -> None:
    prove("gathered", case, dtype)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_triton_kernels_give_attention_by_definition(case: Case) -> None:
    prove("triton", case, torch.float16)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6], CASES[22], CASES[24]], ids=str)
def test_the_triton_kernels_take_bfloat16(case: Case) -> None:
    prove("triton", case, torch.bfloat16)


def test_gathering_in_turns_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "MAX_WORKING_BYTES", 20_000)
    for case in CASES[3:8]:
        prove("gathered", case, torch.float32)


@pytest.mark.parametrize("name", ["gathered", "triton"])
def test_a_query_that_sees_no_key_gives_zeros(name: ImplementationName) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    call = Call(Case("too few", (0, 30), q_len=3, given=False), torch.float16, DEVICE)
    pages = call.pool.chunk(2, dim=2)
    lengths = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    out = implementation(name)(call.q, None, None, *pages, lengths, call.table, scale=0.125)
    assert torch.count_nonzero(out[0]) == 0 and torch.count_nonzero(out[1, 0]) == 0
    assert torch.isfinite(out).all() and torch.count_nonzero(out[1, 1:]) > 0


def over_wide_tables(case: Case, width: int) -> Call:
    """The call with block tables of `width` pages."""
    call = Call(case, torch.float16, DEVICE)
    call.table = torch.nn.functional.pad(call.table, (0, width - call.table.shape[1]))
    return call


@pytest.mark.parametrize(
    "case",
    [
        Case("decode far out", (3, 300), page_tokens=256),
        Case("decode far out, in parts", (1500, 3), heads=2, kv_heads=1, page_tokens=256, given=False),
        Case("chunk far out, of many rows", (30,), q_len=90, heads=4, kv_heads=2, page_tokens=256),
    ],
    ids=str,
)
def test_pages_may_lie_further_out_than_32_bits_count_elements(case: Case) -> None:
    pytest.importorskip("triton")
    call = Call(case, torch.float16, DEVICE)
    expected, small = call.expected_pool(), call.pool
    first = 2**31 // small[0].numel()
    pool = torch.empty(first + len(small), *small.shape[1:], dtype=torch.float16, device=DEVICE)  # memory where written
    call.pool, call.table = pool, call.table + first
    pool[first:] = small
    k_pages, v_pages = pool.chunk(2, dim=2)
    k_new, v_new = call.new.chunk(2, dim=2) if case.given else (None, None)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) + (0 if case.given else case.q_len)
    found = TritonAttention()(call.q, k_new, v_new, k_pages, v_pages, lengths, call.table, scale=case.head_dim**-0.5)
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=4e-3, rtol=4e-3)
    assert same_bits(pool[first:], expected)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("window", [None, 700])
def test_one_width_of_block_tables_fits_every_context(given: bool, window: int | None) -> None:
    pytest.importorskip("triton")
    case = Case("widest", (0, 1, 255, 256, 257, 1500), page_tokens=256, window=window, given=given)
    call = over_wide_tables(case, 64)
    pool = call.expected_pool()
    found = call.run(implementation("triton"))
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=4e-3, rtol=4e-3)
    assert same_bits(call.pool, pool)


def test_programs_beyond_a_context_do_nothing() -> None:
    pytest.importorskip("triton")
    case = Case("parts", (3, 200, 1499), heads=2, kv_heads=1, page_tokens=256)
    call = over_wide_tables(case, 64)
    attention = TritonAttention()
    call.run(attention)
    ((_, sums),) = attention._scratch.values()
    sums.fill_(torch.nan)
    call.run(attention)
    written = sums.isnan().logical_not().nonzero().flatten().tolist()
    # 1,500 tokens are 24 blocks of 64, a part has 4 of them, and there is room for 64 parts of each head.
    assert written == [row * MAX_SPLITS + part for row in (4, 5) for part in range(6)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_attention_keeps_for_parts_of_keys_is_what_a_plan_counts(head_dim: int) -> None:
    pytest.importorskip("triton")
    attention = TritonAttention()
    Call(Case("parts", (700,), heads=2, kv_heads=1, head_dim=head_dim, page_tokens=256), torch.float16, DEVICE).run(
        attention
    )
    kept = sum(each.nbytes for scratch in attention._scratch.values() for each in scratch)
    processors = gpu_of(torch.device(DEVICE)).processors
    assert kept == split_keys_bytes(head_dim, processors)


def test_the_triton_kernels_take_rows_that_lie_apart() -> None:
    pytest.importorskip("triton")
    call = Call(Case("apart", (0, 14, 40), q_len=5), torch.float16, DEVICE)
    pool = call.expected_pool()
    call.q, call.new = (each.transpose(1, 2).contiguous().transpose(1, 2)[:, :] for each in (call.q, call.new))
    found = call.run(implementation("triton"))
    torch.testing.assert_close(found.cpu().double(), call.expected(), atol=4e-3, rtol=4e-3)
    assert found.is_contiguous() and same_bits(call.pool, pool)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (7, 8), (4, 256)])
def test_no_call_needs_a_kernel_that_was_not_prepared(
    group: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    heads, kv_heads, page_tokens, windows = group, 1, 16, (None, 100, 300)
    rows = torch.zeros(4 * 300, heads + 2 * kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
    pages = torch.zeros(4, page_tokens, 2 * kv_heads, head_dim, dtype=torch.float16, device=DEVICE).chunk(2, dim=2)
    attention, reports = TritonAttention(), list[tuple[int, int]]()
    attention.prepare(
        rows[:PREPARED_ROWS, :heads],
        None,
        None,
        *pages,
        windows=windows,
        softcap=0.0,
        varlen=False,
        report=lambda done, total: reports.append((done, total)),
    )
    prepared = attention.variants
    assert [done for done, _ in reports] == list(range(reports[-1][1] + 1)) and len(prepared) > 2
    monkeypatch.setattr(TritonAttention, "_launch", lambda *_: rows[:0])  # decided, and not computed
    lengths_of_calls = (*range(1, 140), 200, 300)
    for batch, tokens, width, window in itertools.product((1, 2, 4), lengths_of_calls, (1, 40, 9000), windows):
        q = rows[: batch * tokens, :heads].unflatten(0, (batch, tokens))
        lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        table = torch.zeros(batch, width, dtype=torch.int32, device=DEVICE)
        attention(q, None, None, *pages, lengths, table, scale=0.3, window=window)
    assert [dict(each[3]) for each in attention.variants - prepared] == []  # type: ignore[index]


CODED = [
    Case("decode over codes", (0, 1, 15, 16, 17, 47), given=False),
    Case("decode over codes, seven heads on a key", (5, 33), heads=7, kv_heads=1, head_dim=128, given=False),
    Case("chunk over codes", (13, 100), q_len=33, heads=3, kv_heads=1, given=False),
    Case("chunk of many rows over codes", (30,), q_len=70, given=False),
    Case("codes of heads of 80", (3, 20), head_dim=80, q_len=2, given=False),
    Case("codes of heads of 8", (3, 40), head_dim=8, given=False),
    Case("codes of heads of 256", (3, 40), head_dim=256, q_len=5, given=False),
    Case("codes in pages of an odd size, capped", (3, 40), q_len=2, page_tokens=12, softcap=5.0, given=False),
    Case("codes in a window", (300, 20), window=130, q_len=3, given=False),
    Case("codes of a long context in parts", (1500, 3), heads=2, kv_heads=1, given=False),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", CODED, ids=str)
def test_the_triton_kernels_attend_over_codes_as_over_their_decoded_pages(
    case: Case, bits: CacheBits, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    call = Call(case, dtype, DEVICE)
    heads = HeadFormat(case.head_dim, bits, dtype.itemsize)
    codec = HeadCodec(heads, [torch.device(DEVICE)])
    codes = codec.encode(call.pool).view(torch.int8)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) + case.q_len
    decoded = codec.decode(codes.view(torch.uint8), torch.empty_like(call.pool))
    found, expected = (
        attention(
            call.q,
            None,
            None,
            *pages.chunk(2, dim=2),
            lengths,
            call.table,
            scale=case.head_dim**-0.5,
            window=case.window,
            softcap=case.softcap,
        )
        for attention, pages in ((TritonAttention(heads), codes), (TritonAttention(), decoded))
    )
    assert torch.isfinite(found).all() and torch.count_nonzero(found)
    if dtype == torch.float16 or DEVICE == "cuda":
        assert torch.equal(found, expected), "codes are decoded to the bit"
    else:  # the interpreter cuts numbers off where bfloat16 has no more digits
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


def test_kernels_are_loaded_on_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    call, attention = Call(CASES[1], torch.float16, DEVICE), TritonAttention()
    inside: list[torch.device] = []
    planned: list[list[torch.device]] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        inside.append(tensor.device)
        yield
        inside.pop()

    plan = attention._plan
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(
        attention, "_plan", lambda *given, **named: (planned.append([*inside]), plan(*given, **named))[1]
    )
    call.run(attention)
    assert planned == [[call.q.device]] and not inside


def test_codes_are_not_appended() -> None:
    pytest.importorskip("triton")
    heads = HeadFormat(64, 8, 2)
    call = Call(CASES[1], torch.float16, DEVICE)
    call.pool = torch.zeros(*call.pool.shape[:3], heads.head_bytes, dtype=torch.int8, device=DEVICE)
    with pytest.raises(ValueError, match="appends no codes"):
        call.run(TritonAttention(heads))


def flash_attn_by_definition(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, totals: Tensor, table: Tensor, scale: float, left: int, softcap: float
) -> Tensor:
    """What flash-attn's kernels compute for window_size=(left, 0)."""
    window = None if left < 0 else left + 1
    return gathered.paged_attention(
        q, None, None, k_pages, v_pages, totals, table, scale=scale, window=window, softcap=softcap
    )


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[23]], ids=str)
def test_varlen_attn_is_asked_for_the_same_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspect.signature(varlen.varlen_attn)

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        asked = real.bind(*args, **kwargs).arguments
        batch, q_len = len(asked["block_table"]), asked["max_q"]
        assert asked["cu_seq_q"].tolist() == [q_len * index for index in range(batch + 1)]
        assert asked["cu_seq_k"].diff().tolist() == asked["seqused_k"].tolist()
        assert {asked[name].dtype for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table")} == {torch.int32}
        assert asked["enable_gqa"] and asked["window_size"][1] == 0
        assert asked["max_k"] >= int(asked["seqused_k"].max())
        out = flash_attn_by_definition(
            asked["query"].unflatten(0, (batch, q_len)),
            asked["key"],
            asked["value"],
            asked["seqused_k"],
            asked["block_table"],
            asked["scale"],
            asked["window_size"][0],
            0.0,
        )
        return out.flatten(0, 1)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    uncapped = Case(**{name: getattr(case, name) for name in Case.__slots__} | {"softcap": 0.0})
    prove("varlen", uncapped, torch.float16)


def test_varlen_attn_refuses_a_soft_cap_that_it_would_ignore() -> None:
    with pytest.raises(ValueError, match="no soft-cap"):
        Call(CASES[23], torch.float16).run(varlen.paged_attention)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4], CASES[23]], ids=str)
def test_flash_attn_is_asked_for_the_same_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:
        assert causal and window_size[1] <= 0
        if k is not None and v is not None:
            gathered.append(k, v, k_cache, v_cache, cache_seqlens, block_table)
            cache_seqlens = cache_seqlens + q.shape[1]
        return flash_attn_by_definition(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_size[0], softcap
        )

    library = ModuleType("flash_attn")
    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    library.flash_attn_varlen_func = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.delitem(sys.modules, "engine.backends.paged_attention.flash", raising=False)
    monkeypatch.delattr("engine.backends.paged_attention.flash", raising=False)
    prove("flash", case, torch.float16)
    del sys.modules["engine.backends.paged_attention.flash"]


def test_tensors_that_do_not_go_together_are_named() -> None:
    call = Call(CASES[3], torch.float16)
    pages = call.pool.chunk(2, dim=2)
    lengths = torch.zeros(4, dtype=torch.int32)
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("4 query heads of 64", (call.q.float(), None, None, *pages, lengths, call.table)),
        ("block table has 3 rows", (call.q, None, None, *pages, lengths, call.table[:3])),
        ("k_new is", (call.q, call.new, call.new, *pages, lengths, call.table)),
        ("come together", (call.q, call.new[:, :, :2], None, *pages, lengths, call.table)),
    ]
    for words, arguments in wrong:
        with pytest.raises(ValueError, match=words):
            gathered.paged_attention(*arguments, scale=1.0)


def test_the_triton_kernels_refuse_float32() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="half precision"):
        Call(CASES[3], torch.float32).run(implementation("triton"))
