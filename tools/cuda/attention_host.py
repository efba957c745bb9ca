"""Host microseconds of paged attention with Triton, of one layer, with a driver that computes nothing: of decodes, and
of a step of decodes and prompts in one call and with a call for each length.

    python -m tools.cuda.attention_host [--rounds N] [--calls N] [--contexts 200 2000 16000]

A decode of one request waits for the host, which launches each layer's attention. Here Triton's own launcher runs in
full, down to a stub in place of libcuda, and tensors are in RAM. So what is left out is what the real driver takes for
a launch, and what the allocator of torch takes more on a GPU than on a CPU. Medians of rounds; the sizes are those of
an 8B Llama. Needs gcc. To compare two commits, run both by turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.exllamav2.attention import FlashAttention
from engine.backends.paged_attention.interface import implementation
from tests.fakes.paged import Case, VarlenCall
from tests.fakes.triton_driver import activate

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def decode(batch: int, context: int, page_tokens: int, *, append: bool) -> Callable[[], Tensor]:
    """Return a decode of `batch` requests: with keys to append and pages of their own, by the call that exllamav2 makes
    of flash-attn, or with keys in the pages as the torch backend has them."""
    attention = implementation("triton")
    width = -(-(context + 1) // page_tokens)
    rows = torch.zeros(batch, 1, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float16)
    pool = torch.zeros(2, page_tokens, 2 * KV_HEADS, HEAD_DIM, dtype=torch.float16)
    q, (k_new, v_new), (keys, values) = rows[:, :, :HEADS], rows[:, :, HEADS:].chunk(2, 2), pool.chunk(2, 2)
    if append:
        q, k_new, v_new, keys, values = (each.contiguous() for each in (q, k_new, v_new, keys, values))
    lengths = torch.full((batch,), context, dtype=torch.int32)
    table = torch.zeros(batch, width, dtype=torch.int32)
    scale = HEAD_DIM**-0.5
    if append:
        call = FlashAttention(attention).paged_with_cache
        pages: dict[str, Any] = {"k_cache": keys, "v_cache": values, "cache_seqlens": lengths, "block_table": table}
        return lambda: call(q=q, k=k_new, v=v_new, **pages, softmax_scale=scale, causal=True)
    return lambda: attention(q, None, None, keys, values, lengths, table, scale=scale)


def mixed(prompts: Sequence[int], *, whole: bool) -> Callable[[], object]:
    """Return a step of 31 decodes and of `prompts`, ascending, after 2,000 tokens each, over pages of 16: in one call
    if `whole`, else with a call for each length."""
    q_lens, attention = (*[1] * 31, *prompts), implementation("triton")
    case = Case("mixed", (2000,) * len(q_lens), heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    call = VarlenCall(case, q_lens, torch.float16)
    return call.prepared(attention) if whole else call.by_length(attention)


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean processor time of one of `calls` calls: on a shared machine, waiting is not its own."""
    began_s = time.thread_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.thread_time() - began_s) / calls


def main() -> None:
    """Measure, and print a line for each kind of decode."""
    parser = argparse.ArgumentParser(description="Host time of one paged attention call with Triton.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000, 16000])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        driver = activate(Path(folder))
        calls: dict[tuple[str, int, int], Callable[[], object]] = {
            (name, batch, context): decode(batch, context, page_tokens, append=append)
            for name, page_tokens, append in (("exllamav2", 256, True), ("torch", 16, False))
            for batch in (1, 32)
            for context in given.contexts
        }
        for prompts in ((2000,), (300, 600, 1100)):
            for name, whole in (("by length", False), ("one call", True)):
                calls[name, len(prompts), 2000] = mixed(prompts, whole=whole)
        calls_us: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
        for call in calls.values():
            call()  # compiles
        for _ in range(given.rounds):
            for key, call in calls.items():
                calls_us[key].append(microseconds(call, given.calls))
        empty_us = statistics.median(microseconds(lambda: torch.empty(4096), given.calls) for _ in range(given.rounds))
        for (name, batch, context), each_us in calls_us.items():
            before = driver.launches
            calls[name, batch, context]()
            median, least = statistics.median(each_us), min(each_us)
            launches = driver.launches - before
            print(f"{name:9} {batch:2} x {context:5} tokens: {median:6.1f} us, least {least:.1f}; {launches} launches")
        print(f"torch.empty in RAM: {empty_us:.1f} us")


if __name__ == "__main__":
    main()
