"""The host's time of a decode step on CUDA: everything but the device's own work, measured without a GPU.

    python -m tools.cuda.step_host [--requests 1 64] [--context 1000] [--steps 200] [--temperature T] [--top-p P]
        [--profile]

A tiny model's steps are recorded as on CUDA, and a replay does nothing. What is left is what the host does while a GPU
computes: planning, indices and block tables, sampling's launches (on a CPU, of 320 tokens, so that they compute next to
nothing), reading back and commit; and in the worker's loop text, stop strings, statistics and encoding. What a launch
costs in CUDA's driver is not in it. Microseconds of the thread's CPU time, medians of the steps. To compare two
commits, run both by turns.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.torch import runner as runner_module
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.cuda import decode_graphs
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.loop import WorkerLoop
from engine.worker_process.protocol import Codec, Command, Event, Load, LoadFailed, StepBatch, Submit
from tests.fakes.tiny_models import make_tiny_model

PAGE_TOKENS, STEP_TOKENS, WARM_UPS = 16, 512, 20


class IdleRecorder:
    """Records steps that do nothing when they are replayed."""

    def record(self, compute: Callable[[], None]) -> IdleRecorder:
        """Compute once, for the logits."""
        compute()
        return self

    def replay(self) -> None:
        """Leave the logits as they are."""


class InstantReadback:
    """Copies at once what a GPU's queue would copy later."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy it."""
        return tensor.clone()

    def mark(self) -> Callable[[], None]:
        """Wait for nothing."""
        return lambda: None


@contextmanager
def idle_device() -> Iterator[None]:
    """Have runners compute over pages in place, with recordings and asynchronous scheduling, as on CUDA."""
    attention = (Choice("gathered", "as on CUDA"), gathered.paged_attention)
    with (
        patch.object(ModelRunner, "pick_attention", lambda runner, page_tokens: attention),
        patch.object(runner_module, "recorder_for", lambda device: IdleRecorder()),
        patch.object(decode_graphs, "adapters_problem", lambda devices, dtype: ""),
        patch.object(runner_module, "readback_for", lambda device: InstantReadback()),
    ):
        yield


class Engine:
    """The engine's end of the worker's channel: encodes what it is sent, and counts the tokens in it."""

    closed = False

    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.tokens = 0
        self._codec = Codec()

    def take(self, timeout_s: float = 0.0) -> Command | None:
        """Return the next command."""
        return self.commands.popleft() if self.commands else None

    def has_waiting(self, *kinds: type[Command]) -> bool:
        """Return False: a load goes on to its end."""
        return False

    def wake(self) -> None:
        """Do nothing: no step waits."""

    def send(self, event: Event) -> None:
        """Encode it as for the socket."""
        if isinstance(event, LoadFailed):
            raise SystemExit(event.error.message)
        self._codec.frame(event)
        if isinstance(event, StepBatch):
            self.tokens += sum(len(output.token_ids) for output in event.outputs)


class TimedBackend(TorchBackend):
    """took_us: of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.took_us: list[float] = []

    def step(self) -> Sequence[TokenEvent]:
        """Time it."""
        began_s = time.thread_time()
        events = super().step()
        self.took_us.append(1e6 * (time.thread_time() - began_s))
        return events


def measure(folder: Path, requests: int, given: argparse.Namespace) -> tuple[float, float]:
    """Return the median microseconds of a step of `requests` decodes: of the backend, and of the worker's loop."""
    backend, engine = TimedBackend(), Engine()
    loop = WorkerLoop(cast(WorkerChannel, engine), lambda spec: backend)
    tokens = given.context + WARM_UPS + given.steps + STEP_TOKENS
    spec = ModelSpec(path=folder, name="tiny", device="cpu", dtype="float32", kv_cache_tokens=requests * tokens)
    load = Load(spec=spec, max_prompts=requests, step_tokens=STEP_TOKENS, page_tokens=PAGE_TOKENS, threads=1)
    params = SamplingParams(temperature=given.temperature, top_p=given.top_p, seed=1, ignore_eos=True)
    engine.commands.append(load)
    for number in range(requests):
        prompt = [5 + (7 * at + 13 * number) % 290 for at in range(given.context)]
        engine.commands.append(Submit(request=BackendRequest(id=str(number), prompt_ids=prompt, params=params)))
    while backend.stats().decoding < requests:
        loop._iterate()
    took_us = []
    profile = cProfile.Profile()
    for step in range(WARM_UPS + given.steps):
        if step == WARM_UPS:
            engine.tokens = 0
            backend.took_us.clear()
            if given.profile:
                profile.enable()
        began_s = time.thread_time()
        loop._iterate()
        took_us.append(1e6 * (time.thread_time() - began_s))
    profile.disable()
    if given.profile:
        profile.print_stats("tottime")
    loop._send_batch()
    assert engine.tokens >= requests * (given.steps - 1), f"{engine.tokens} tokens of {given.steps} steps"
    return statistics.median(backend.took_us), statistics.median(took_us[WARM_UPS:])


def main() -> None:
    """Print a line for each number of requests."""
    parser = argparse.ArgumentParser(description="Host time of a decode step on CUDA, without a GPU.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="then print what takes the most, by cProfile")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, idle_device():
        made = make_tiny_model(Path(folder), max_position_embeddings=8192, num_hidden_layers=1)
        for requests in given.requests:
            step_us, loop_us = measure(made, requests, given)
            print(
                f"{requests:4} requests of {given.context} tokens: {step_us:6.0f} us, with the loop {loop_us:6.0f} us"
            )


if __name__ == "__main__":
    main()
