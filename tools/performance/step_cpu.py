"""Host time of a decode step on a CPU: scheduler, plan, sampling, commit, and Python around the native call.

    python -m tools.performance.step_cpu (--shape 135m | --model DIR) [--sequences 1 8] [--weights NAME] [--threads N]
        [--steps N]

Least, lower tenth and median of the steps: microseconds of a step, and the processor time of the thread that runs it
outside the native call, of which other work on the machine changes less. To compare two commits, run both by turns.
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

from engine.backends.base import BackendRequest
from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec, SamplingParams, WeightsName
from tests.fakes.oracle import ignore_progress, never
from tools.synthetic_models import make_synthetic

PAGE_TOKENS, STEP_TOKENS, PROMPT_TOKENS, WARM_UPS = 16, 512, 120, 20


class NativeTime:
    """Processor time of the calling thread in a native function. seconds: so far."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *arguments: object) -> object:
        """Call it."""
        began_s = time.thread_time()
        result = self._function(*arguments)
        self.seconds += time.thread_time() - began_s
        return result


def measure(folder: Path, sequences: int, given: argparse.Namespace) -> None:
    """Print a line."""
    backend = TorchBackend()
    tokens = PROMPT_TOKENS + WARM_UPS + given.steps + STEP_TOKENS
    spec = ModelSpec(
        path=folder, name=folder.name, device="cpu", weights=given.weights, kv_cache_tokens=sequences * tokens
    )
    backend.load(
        spec,
        max_prompts=sequences,
        step_tokens=STEP_TOKENS,
        page_tokens=PAGE_TOKENS,
        report=ignore_progress,
        cancelled=never,
    )
    stack = backend._loaded()[0]._stack
    if stack is None:
        raise SystemExit("this model does not run in one native call here")
    stack._run = native = NativeTime(stack._run)  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        prompt = [5 + (7 * at + 13 * number) % 290 for at in range(PROMPT_TOKENS)]
        backend.submit(BackendRequest(id=str(number), prompt_ids=prompt, params=params))
    while backend.stats().decoding < sequences:
        backend.step()
    took_us, besides_us = [], []
    for step in range(WARM_UPS + given.steps):
        native.seconds = 0.0
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        backend.step()
        if step >= WARM_UPS:
            besides_us.append(1e6 * (time.thread_time() - began_cpu_s - native.seconds))
            took_us.append(1e6 * (time.perf_counter() - began_s))
    backend.unload()
    print(f"{sequences:3} sequences, step {text(took_us)}; besides its native call {text(besides_us)}", flush=True)


def text(numbers_us: list[float]) -> str:
    """Least, lower tenth and median."""
    ordered = sorted(numbers_us)
    return f"{ordered[0]:.0f}, {ordered[len(ordered) // 10]:.0f}, {statistics.median(ordered):.0f} us"


def main() -> None:
    """Measure a folder or a synthetic shape."""
    parser = argparse.ArgumentParser(description="Host time of a decode step on a CPU.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a model folder")
    which.add_argument("--shape", choices=("135m", "0.5b"))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weights", choices=get_args(WeightsName), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        made = given.model or make_synthetic(given.shape, Path(folder) / given.shape)
        for sequences in given.sequences:
            measure(made, sequences, given)


if __name__ == "__main__":
    main()
