"""OpenVINO GenAI's ContinuousBatchingPipeline. The model is OpenVINO's own format; arithmetic is in bfloat16 where the
CPU has that, else in float32, as by its default: asked for bfloat16 there, it refuses to run. `mode` is the kind of its
weights: "int8", or "fp16", which are computed with in either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy
import openvino
import openvino_genai

from tools.benchmarks.protocol import Arrived, Given, Prompt, Ready, Stepper, precision_of_openvino, serve

_STEP_TOKENS = 2048  # a third more at 32 clients than its default of 256


@asynccontextmanager
async def loaded(given: Given) -> AsyncIterator[Ready]:
    """Load the model."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = given.kv_gib
    scheduler.max_num_seqs = given.clients
    scheduler.max_num_batched_tokens = _STEP_TOKENS
    scheduler.enable_prefix_caching = False
    native = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    inference = "bf16" if "BF16" in native else "f32"
    properties = {"INFERENCE_PRECISION_HINT": inference, "INFERENCE_NUM_THREADS": given.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(given.model), scheduler, "CPU", properties)
    numbers = count()
    running: dict[openvino_genai.GenerationHandle, Arrived] = {}

    def add(prompt: Prompt, tokens: int, arrived: Arrived) -> Callable[[], object]:
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.min_new_tokens = config.max_new_tokens = tokens
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        handle = pipeline.add_request(next(numbers), ids, config)
        running[handle] = arrived
        return lambda: (running.pop(handle, None), handle.cancel())

    def step() -> None:
        pipeline.step()
        for handle, arrived in list(running.items()):
            if handle.can_read():
                arrived(sum(len(output.generated_ids) for output in handle.read().values()))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[handle]

    yield Ready(precision_of_openvino(given.mode, inference, _cpuinfo()), ask=Stepper(add, step).ask)


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8")


if __name__ == "__main__":
    serve(loaded, ["openvino", "openvino-genai"])
