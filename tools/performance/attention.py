"""The time of native attention in a layer, with each set of kernels that this CPU can run.

    python -m tools.performance.attention [--threads N] [--cache-bits N] [--turns N] [--decodes 1 8 32]
        [--prompts 128 2048] [--after 0 7500] [--sets NAME ...] [--files PATH ...]

Microseconds per layer: the mean over layers of the least of the turns, which the sets take one after the other. Heads
are those of the 135M shape (9 query, 3 key heads of 64, bfloat16); decodes come after 192 tokens each, over huge pages
in no order, and 30 layers in turn, so that they come from memory. --after: tokens that were computed before those of a
prompt, default none. --sets: of instructions, default all. --files: libraries that were compiled from other sources for
the widest set, a column each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.native_build import InstructionSet
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.huge_pages import advise_huge_pages
from engine.backends.torch.native.attention import Heads, NativeAttention
from engine.backends.torch.native.library import NativeLibrary
from engine.config import CacheBits
from tests.fakes.native_libraries import LIBRARIES, SETS, native

HEADS = Heads(heads=9, kv_heads=3, head_dim=64, window=None, scale=64**-0.5)
LAYERS, PAGE_TOKENS, CONTEXT = 30, 16, 192
ROWS = HEADS.heads + 2 * HEADS.kv_heads

Case = tuple[str, Sequence[tuple[int, int]]]
"""A name, and of each sequence the tokens before and of the step."""


def main() -> None:
    """Print a table."""
    names = [name for name in LIBRARIES if "emulated" not in name]
    widest: InstructionSet = "amx-bf16" if "amx-bf16" in names else SETS[0]
    parser = argparse.ArgumentParser(description="Microseconds per layer of native attention, by set of kernels.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-bits", type=int, default=16, choices=(16, 8, 4))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--decodes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--after", type=int, nargs="*", default=[0])
    parser.add_argument("--sets", nargs="*", choices=names, default=names)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    libraries = {name: native(name) for name in options.sets}
    libraries |= {path.stem: NativeLibrary(widest, path) for path in options.files}
    cases: list[Case] = [(f"{count} decodes", [(CONTEXT, 1)] * count) for count in options.decodes]
    for before in options.after:
        after = f" after {before}" if before else ""
        cases += [(f"a prompt of {tokens}{after}", [(before, tokens)]) for tokens in options.prompts]
    print("| | " + " | ".join(libraries) + " |")
    print("|---" * (len(libraries) + 1) + "|")
    for name, sequences in cases:
        calls = [layers(library, sequences, options.cache_bits) for library in libraries.values()]
        least_us = [[float("inf")] * LAYERS for _ in calls]
        for _ in range(options.turns + 1):  # the first warms up
            for call, each_us in zip(calls, least_us, strict=True):
                for layer in range(LAYERS):
                    began_s = time.perf_counter()
                    call(layer)
                    each_us[layer] = min(each_us[layer], 1e6 * (time.perf_counter() - began_s))
        print(f"| {name} | " + " | ".join(f"{sum(each_us) / LAYERS:.0f}" for each_us in least_us) + " |", flush=True)


def layers(library: NativeLibrary, sequences: Sequence[tuple[int, int]], bits: CacheBits) -> Callable[[int], object]:
    """Return a call of attention in a layer, after the tokens before were laid into the pages."""
    format = HeadFormat(HEADS.head_dim, bits, 2)
    each = [-(-(before + tokens) // PAGE_TOKENS) for before, tokens in sequences]
    shape = (sum(each), PAGE_TOKENS, 2 * HEADS.kv_heads, format.head_bytes)
    pools = advise_huge_pages(torch.empty((LAYERS, *shape), dtype=torch.uint8)).zero_().unbind()
    attention = NativeAttention(library, [HEADS] * LAYERS, pools, dtype=torch.bfloat16, bits=bits)
    pages = torch.randperm(sum(each), generator=torch.Generator().manual_seed(0)).split(each)
    tables = [part.tolist() for part in pages]

    def attend(chunks: list[ChunkInput]) -> None:
        step = attention.step(chunks)
        rows = torch.randn(len(step.positions), ROWS, HEADS.head_dim).bfloat16()
        for layer in range(LAYERS):
            step.attend(layer, rows, None)

    for (before, _), table in zip(sequences, tables, strict=True):
        if before:
            attend([ChunkInput(range(before), 0, table, sample=False)])
    step = attention.step(
        [
            ChunkInput(range(tokens), before, table, sample=False)
            for (before, tokens), table in zip(sequences, tables, strict=True)
        ]
    )
    rows = torch.randn(len(step.positions), ROWS, HEADS.head_dim).bfloat16()

    return lambda layer: step.attend(layer, rows, None)


if __name__ == "__main__":
    main()
