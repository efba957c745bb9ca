"""The paged attention kernels on the GPU: against attention by definition at real sizes, and how fast they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.exllamav2.attention import FlashAttention
from engine.backends.exllamav2.library import Library
from engine.backends.exllamav2.packed_cache import CODE_BITS, PackedReads
from engine.backends.paged_attention.choose import ORDER, AttentionFacts, ImplementationName, obstacle
from engine.backends.paged_attention.interface import PagedAttention, implementation
from engine.backends.paged_attention.probe import failure, probe
from engine.config import CacheBits
from engine.errors import BackendUnavailable
from tests.fakes.paged import Call, Case, VarlenCall, same_bits
from tests.gpu.library import imported
from tests.gpu.place import Place
from tests.gpu.report import Row, at_most, attempt, measured, promise, skipped

if TYPE_CHECKING:
    from engine.backends.paged_attention.triton_attention import TritonAttention

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
"""The same as on a CPU."""

_EDGES = (0, 1, 255, 256, 257, 1000, 4095)
CASES = (
    Case("decode, head 128", _EDGES, heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    Case("decode, head 64, keys in place", _EDGES, heads=32, kv_heads=8, page_tokens=256, given=False),
    Case("decode, small pages", (0, 15, 16, 17, 900), heads=16, kv_heads=8, head_dim=128),
    Case("decode, seven heads on a key", (3, 800), heads=28, kv_heads=4, head_dim=128, page_tokens=256),
    Case("decode, long context", (9000, 5), heads=8, kv_heads=2, head_dim=128, page_tokens=256),
    Case("draft of 5", (0, 250, 256, 2000), q_len=5, heads=16, kv_heads=4, head_dim=128, page_tokens=256),
    Case("chunk of 300", (0, 700), q_len=300, heads=8, kv_heads=2, head_dim=128, page_tokens=256),
    Case("head 96", (3, 600), heads=8, kv_heads=8, head_dim=96, page_tokens=256),
    Case("head 256", (3, 600), q_len=20, heads=8, kv_heads=2, head_dim=256, page_tokens=256),
    Case("window", (300, 3000), q_len=3, heads=8, kv_heads=4, head_dim=128, page_tokens=256, window=1024),
    Case("soft-cap and window", (40, 2000), q_len=2, heads=8, kv_heads=4, page_tokens=256, softcap=50.0, window=512),
)
_TORCH = Case("", (1024,), heads=32, kv_heads=8, head_dim=128, given=False)
"""As the torch backend calls it: small pages, in which the new keys lie."""
SPEEDS = (
    Case("1 x 1024", (1024,), heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    Case("32 x 1024", (1024,) * 32, heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    Case("64 x 512", (512,) * 64, heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    Case("1 x 16384", (16384,), heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    Case("chunk of 2048", (0,), q_len=2048, heads=32, kv_heads=8, head_dim=128, page_tokens=256),
    replace(_TORCH, name="1 x 1024, pages of 16"),
    replace(_TORCH, name="32 x 1024, pages of 16", lengths=(1024,) * 32),
    replace(_TORCH, name="1 x 16384, pages of 16", lengths=(16384,)),
    replace(_TORCH, name="chunk of 2048, pages of 16", lengths=(0,), q_len=2048),
)
_MIXED = Case(
    "decodes and prompts", (4000,) * 31 + (0, 900, 30_000), heads=32, kv_heads=8, head_dim=128, page_tokens=256
)
VARLEN = (
    (Case("a prompt and decodes", (4095, 0, 7), heads=32, kv_heads=8, head_dim=128, page_tokens=256), (1, 1, 300)),
    (Case("prompts in a window", (3000, 300, 0), heads=8, kv_heads=4, page_tokens=256, window=1024), (1, 40, 200)),
    (Case("a long chunk in parts", (9000, 5), heads=8, kv_heads=2, head_dim=128, page_tokens=256), (50, 90)),
)
"""Calls of sequences with different numbers of new tokens, which are given."""
_MIXED_Q_LENS = (*(1,) * 31, 40, 600, 1100)
_CODE_BITS: tuple[CacheBits, ...] = (8, 4)
HOST_GOAL_US = 15.0
"""Of one call for one request, whose steps wait for the host."""


def checks(place: Place) -> Iterator[Row]:
    """For each implementation a row for each dtype, then times of one call: on the device, with SDPA's over plain
    tensors, and on the host."""
    facts = probe(torch.device("cuda", 0))
    for name in ORDER:
        for dtype in TOLERANCE:
            title = f"{name}, {dtype}"
            yield from attempt(title, partial(_proof, title, name, dtype, facts))
    for bits in _CODE_BITS:
        coded = replace(facts, heads=32, kv_heads=8, head_dim=128, page_tokens=16, dtype="bfloat16", cache_bits=bits)
        yield from attempt(f"triton, KV codes of {bits} bits", partial(_coded_proof, coded))
    for name in CODE_BITS:
        yield from attempt(f"exllamav2's KV of {name} bits", partial(_packed_rows, name, facts))
    yield from attempt("mixed steps", partial(_mixed_times, facts))
    for case in (SPEEDS[0], SPEEDS[1], SPEEDS[5]) if place.quick else SPEEDS:
        yield from attempt(f"time of {case}", partial(_times, case, facts))
    for case in (SPEEDS[0], SPEEDS[5]):
        yield from attempt(f"host time of {case}", partial(_host_times, case, facts))


def fitting(case: Case, dtype: str, facts: AttentionFacts) -> AttentionFacts:
    """The machine's facts for this call."""
    return replace(
        facts,
        page_tokens=case.page_tokens,
        head_dim=case.head_dim,
        dtype=dtype,
        softcap=case.softcap,
        window=case.window,
    )


def _proof(title: str, name: ImplementationName, dtype: str, facts: AttentionFacts) -> list[Row]:
    """All cases that fit: right results, and no bit changed in the pages but those of the new tokens."""
    fits = [case for case in CASES if not obstacle(name, fitting(case, dtype, facts))]
    if not fits:
        return [skipped(title, obstacle(name, fitting(CASES[0], dtype, facts)))]
    worst, wrong = 0.0, []
    for case in fits:
        off, clean = deviation(case, implementation(name), getattr(torch, dtype), "cuda")
        worst = max(worst, off)
        if not (clean and off <= TOLERANCE[dtype]):
            wrong.append(f"{case} (off by {off:.3g}{'' if clean else ', pages damaged'})")
    chunked = [(case, q_lens) for case, q_lens in VARLEN if not obstacle(name, fitting(case, dtype, facts))]
    for case, q_lens in chunked:
        attention = implementation(name, devices=[torch.device("cuda", 0)])
        off, clean = varlen_deviation(case, q_lens, attention, getattr(torch, dtype), "cuda")
        worst = max(worst, off)
        if not (clean and off <= TOLERANCE[dtype]):
            wrong.append(f"{case} (off by {off:.3g}{'' if clean else ', pages damaged'})")
    tried = f"{len(fits) + len(chunked)} of {len(CASES) + len(VARLEN)}"
    said = "; ".join(wrong) or f"{tried} cases fit it, all within {TOLERANCE[dtype]:g}"
    return [promise(title, not wrong, said, value=worst)]


def _coded_proof(facts: AttentionFacts) -> list[Row]:
    """Decodes and a chunk over codes in the pages, against gathered pages that were decoded before."""
    title = f"triton, KV codes of {facts.cache_bits} bits"
    if unfit := obstacle("triton", facts):
        return [skipped(title, unfit)]
    problem = failure("triton", facts, torch.device("cuda", 0))
    return [promise(title, not problem, problem)]


def _packed_rows(bits: int, facts: AttentionFacts) -> Iterable[Row]:
    title = f"exllamav2's KV of {bits} bits"
    if unfit := obstacle("triton", facts):
        return [skipped(title, unfit)]
    try:
        library = imported()
    except BackendUnavailable as error:
        return [skipped(title, error.message)]
    return packed_cache_rows(library, bits, torch.device("cuda", 0), (32, 8, 128), microseconds)


def packed_cache_rows(
    library: Library,
    bits: int,
    device: torch.device,
    sizes: tuple[int, int, int],
    timed: Callable[[Callable[[], object]], float],
    contexts: Iterable[tuple[int, int]] = ((1, 1024), (32, 1024), (1, 16384)),
) -> Iterator[Row]:
    """Whether one of the library's packed caches gives the same if it is read as it is, by the trial of a load; then
    the time of a layer's attention in a decode, of pages that the library decodes and of such. sizes: query heads, key
    heads, and elements of one.  contexts: requests, and tokens of each."""
    from engine.backends.paged_attention.triton_attention import TritonAttention

    heads, kv_heads, size = sizes
    config = SimpleNamespace(num_key_value_heads=kv_heads, num_hidden_layers=1, head_dim=size)
    model = SimpleNamespace(config=config, cache_map={0: str(device)}, get_cache_devices=lambda: [str(device)])
    requests, paged = list(contexts), TritonAttention(devices=[device])
    pages = max(batch * (-(-tokens // PAGE_TOKENS) + 1) for batch, tokens in requests)
    cache = library.caches[bits](model, batch_size=1, max_seq_len=max(4, pages) * PAGE_TOKENS)
    reads = PackedReads(cache, paged)
    problem = reads.failure(heads, {None}, 0.0)
    yield promise(f"exllamav2's KV of {bits} bits, read as it is", not problem, problem)
    if problem:
        return
    calls = {each: _library_decode(cache, paged, reads, sizes, *each) for each in requests}
    decoded = {each: timed(call) for each, call in calls.items()}
    reads.engage()
    for each, call in calls.items():
        name = f"{each[0]} x {each[1]}, exllamav2's KV of {bits} bits"
        yield measured(f"{name}, decoded", decoded[each], "us")
        yield measured(f"{name}, read as it is", timed(call), "us")


def _library_decode(
    cache: Any, paged: TritonAttention, reads: PackedReads, sizes: tuple[int, int, int], batch: int, tokens: int
) -> Callable[[], object]:
    """What the library calls for a layer's attention in a decode of `batch` requests, whose pages lie in disorder."""
    heads, kv_heads, size = sizes
    attention = FlashAttention(paged)
    attention.register(reads)
    k_pages, v_pages = (each.view(-1, PAGE_TOKENS, kv_heads, size) for each in cache.get_kv_state(0, 1, 0, 0))
    width = tokens // PAGE_TOKENS + 1
    table = torch.randperm(batch * width).int().view(batch, width).to(k_pages.device)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=k_pages.device)
    q, k, v = (torch.randn(batch, 1, each, size).to(k_pages) for each in (heads, kv_heads, kv_heads))
    place = (PAGE_TOKENS, lengths, table)

    @torch.inference_mode()
    def step() -> Tensor:
        cache.get_kv_state(0, batch, 0, 0, *place)
        cache.get_kv_state(0, batch, 0, tokens, *place)
        attend = attention.paged_with_cache if "get_kv_state" in vars(cache) else FlashAttention(paged).paged_with_cache
        out = attend(
            q, k_pages, v_pages, k, v, cache_seqlens=lengths, block_table=table, causal=True, softmax_scale=size**-0.5
        )
        cache.store_kv_state(0, batch, 0, 1, *place)
        return out

    return step


def deviation(case: Case, attention: PagedAttention, dtype: torch.dtype, device: str) -> tuple[float, bool]:
    """How far the result is off, beside 1 + its own size; whether the pages are what they should be."""
    call = Call(case, dtype, device)
    expected, pool = call.expected(), call.expected_pool()
    found = call.run(attention).cpu().double()
    off = ((found - expected).abs() / (1 + expected.abs())).nan_to_num(torch.inf).max()
    return float(off), same_bits(call.pool, pool)


def varlen_deviation(
    case: Case, q_lens: tuple[int, ...], attention: PagedAttention, dtype: torch.dtype, device: str
) -> tuple[float, bool]:
    """As `deviation`, of a call with different numbers of new tokens."""
    call = VarlenCall(case, q_lens, dtype, device)
    expected, before = call.expected(), call.pool.clone()
    found = call.run(attention).cpu().double()
    off = ((found - expected).abs() / (1 + expected.abs())).nan_to_num(torch.inf).max()
    return float(off), same_bits(call.pool, before)


def _mixed_times(facts: AttentionFacts) -> Iterable[Row]:
    """Microseconds of the attention of a layer in a step of decodes and prompts, in one call and in one for each
    length."""
    call = VarlenCall(_MIXED, _MIXED_Q_LENS, torch.bfloat16, "cuda")
    call.pool.nan_to_num_()
    for name in ORDER:
        if name != "gathered" and not obstacle(name, fitting(_MIXED, "bfloat16", facts)):
            attention = implementation(name, devices=[torch.device("cuda", 0)])
            yield measured(f"{_MIXED}, {name}, one call", microseconds(call.prepared(attention)), "us")
            parts = call.by_length(attention)
            yield measured(f"{_MIXED}, {name}, by length", microseconds(lambda parts=parts: torch.cat(parts())), "us")


def _times(case: Case, facts: AttentionFacts) -> Iterable[Row]:
    """Microseconds of one call of every implementation, and of SDPA, which has neither pages nor an append to do."""
    for name, call in _fitting_calls(case, facts):
        yield measured(f"{case}, {name}", microseconds(paged(call, implementation(name))), "us")
    yield measured(f"{case}, SDPA without pages", microseconds(_sdpa(case)), "us")


def _host_times(case: Case, facts: AttentionFacts) -> Iterable[Row]:
    """Microseconds of the host in one call of every implementation: with Triton against a goal."""
    for name, call in _fitting_calls(case, facts):
        us = host_microseconds(paged(call, implementation(name)), torch.cuda.synchronize)
        title = f"host time of {case}, {name}"
        yield at_most(title, us, HOST_GOAL_US, "us") if name == "triton" else measured(title, us, "us")


def _fitting_calls(case: Case, facts: AttentionFacts) -> Iterator[tuple[ImplementationName, Call]]:
    """Yield the implementations that fit, and the call in the dtype of the backend whose case it is."""
    dtype = "float16" if case.given else "bfloat16"
    call = Call(case, getattr(torch, dtype), "cuda")
    for name in ORDER:
        if not obstacle(name, fitting(case, dtype, facts)):
            yield name, call


def paged(call: Call, attention: PagedAttention) -> Callable[[], Tensor]:
    """The call, again and again: where it appends, the new keys go to the same place each time."""
    k_pages, v_pages = call.pool.chunk(2, dim=2)
    k_new, v_new = call.new.chunk(2, dim=2) if call.case.given else (None, None)
    known = 0 if call.case.given else call.case.q_len
    lengths = torch.tensor(call.case.lengths, dtype=torch.int32, device=call.device) + known
    scale = call.case.head_dim**-0.5
    return lambda: attention(call.q, k_new, v_new, k_pages, v_pages, lengths, call.table, scale=scale)


def _sdpa(case: Case) -> Callable[[], Tensor]:
    batch, known = len(case.lengths), case.lengths[0] + case.q_len
    q = torch.randn(batch, case.heads, case.q_len, case.head_dim, dtype=torch.float16, device="cuda")
    k, v = torch.randn(2, batch, case.kv_heads, known, case.head_dim, dtype=torch.float16, device="cuda")
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=case.q_len > 1, enable_gqa=True)


def host_microseconds(
    action: Callable[[], object], wait: Callable[[], None], calls: int = 200, rounds: int = 7
) -> float:
    """Median over rounds of the mean of some calls, timed by the host; fewer than the device's queue holds, so that
    none waits for it."""
    times: list[float] = []
    for _ in range(1 + rounds):
        wait()
        began_s = time.perf_counter()
        for _ in range(calls):
            action()
        times.append(1e6 * (time.perf_counter() - began_s) / calls)
    wait()
    return statistics.median(times[1:])


def microseconds(action: Callable[[], object], calls: int = 20, rounds: int = 5) -> float:
    """Median over rounds of the mean of some calls, timed by the device."""
    for _ in range(3):
        action()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            action()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return statistics.median(times)
