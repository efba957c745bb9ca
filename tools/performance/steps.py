"""The time of a step without the engine around it: decodes of some sequences at once, and whole prompts.

    python -m tools.performance.steps (--shape 135m | --model DIR) [--sequences 1 8 32] [--prompts 512 2048]
        [--cache-bits N] [--attention NAME] [--dtype NAME] [--weights NAME] [--threads N] [--turns N] [--profile]

Milliseconds, median and least of the turns. Decodes come after 112 tokens and more, of which no two sequences have as
many. To compare two settings, or two commits, run both by turns, on a machine with nothing else running.
`GOMP_SPINCOUNT` is as it is set: workers set it, this does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from torch.profiler import ProfilerActivity, profile

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.runner import ModelRunner
from engine.config import AttentionName, CacheBits, DtypeName, ModelSpec, WeightsName
from tests.fakes.oracle import ignore_progress, never
from tools.synthetic_models import make_synthetic

PAGE_TOKENS, FIRST_TOKENS, WARM_UPS = 16, 112, 4


class Decodes:
    """Sequences that go on by a token in each step."""

    def __init__(self, runner: ModelRunner, count: int, turns: int) -> None:
        self._runner, self._ends = runner, [FIRST_TOKENS + number for number in range(count)]
        pages = -(-(max(self._ends) + turns) // PAGE_TOKENS)
        self._pages = [range(1 + number * pages, 1 + (number + 1) * pages) for number in range(count)]
        for number, end in enumerate(self._ends):
            feed(runner, [ChunkInput(prompt(end), 0, self._pages[number], sample=True)])

    def step(self) -> None:
        """One token for each."""
        parts = zip(self._ends, self._pages, strict=True)
        feed(self._runner, [ChunkInput([9], end, pages, True, residency=pages.start) for end, pages in parts])
        self._ends = [end + 1 for end in self._ends]


def prompt(tokens: int) -> list[int]:
    """Return `count` ids."""
    return [5 + index % 290 for index in range(tokens)]


@torch.inference_mode()
def feed(runner: ModelRunner, chunks: list[ChunkInput]) -> None:
    """A step, with the likeliest token of each."""
    runner.forward(chunks).argmax(-1)


def timed(step: Callable[[], None], turns: int) -> str:
    """Median and least, after some steps that warm up."""
    took_ms = []
    for turn in range(WARM_UPS + turns):
        began_s = time.perf_counter()
        step()
        if turn >= WARM_UPS:
            took_ms.append(1e3 * (time.perf_counter() - began_s))
    return f"{statistics.median(took_ms):8.2f} ms, least {min(took_ms):.2f}"


def measure(model: Path, given: argparse.Namespace) -> None:
    """Print a line for each number of sequences and each prompt."""
    spec = ModelSpec(
        path=model,
        name=model.name,
        device="cpu",
        dtype=given.dtype,
        weights=given.weights,
        attention=given.attention,
        cache_bits=given.cache_bits,
    )
    runner = ModelRunner.load(model, spec, report=ignore_progress, cancelled=never)
    most = max(given.sequences)
    tokens = max([most * (FIRST_TOKENS + most + 2 * (WARM_UPS + given.turns)), *given.prompts]) + most * PAGE_TOKENS
    pages = 4 * -(-tokens // PAGE_TOKENS)  # a quarter of them may be kept side by side
    runner.allocate_kv(pages, PAGE_TOKENS, report=ignore_progress, max_sequences=most)
    runner.enlarge_pages()
    print(f"{runner.dtype_name}, {runner.linear}, attention {runner.attention.name}, {torch.get_num_threads()} threads")
    for count in given.sequences:
        decodes = Decodes(runner, count, 2 * (WARM_UPS + given.turns))
        print(f"{count:5} decodes {timed(decodes.step, given.turns)}", flush=True)
        if given.profile:
            with profile(activities=[ProfilerActivity.CPU]) as found:
                for _ in range(given.turns):
                    decodes.step()
            print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    for length in given.prompts:
        chunk = ChunkInput(prompt(length), 0, range(1, 2 + length // PAGE_TOKENS), sample=True)
        print(f"prompt of {length} {timed(lambda chunk=chunk: feed(runner, [chunk]), 3)}", flush=True)  # type: ignore[misc]


def main() -> None:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description="Milliseconds of a step, without the engine around it.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a model folder")
    which.add_argument("--shape", choices=("135m", "0.5b"))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    parser.add_argument("--cache-bits", type=int, choices=get_args(CacheBits), default=16)
    parser.add_argument("--attention", choices=get_args(AttentionName), default="auto")
    parser.add_argument("--dtype", choices=get_args(DtypeName), default="auto")
    parser.add_argument("--weights", choices=get_args(WeightsName), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="then print what takes the most, by torch's profiler")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.model:
        measure(given.model, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(make_synthetic(given.shape, Path(folder) / given.shape), given)


if __name__ == "__main__":
    main()
