"""OpenVINO GenAI's ContinuousBatchingPipeline. The model is OpenVINO's own format; arithmetic is in bfloat16 where the
CPU has that, else in float32, as by its default: asked for bfloat16 there, it refuses to run. `mode` is the kind of its
weights: "int8", or "fp16", which are computed with in either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import openvino
import openvino_genai

from tools.benchmarks.precisions import of_openvino
from tools.benchmarks.protocol import Given, Ready, Work, serve

_CACHE_GB = 2
_STEP_TOKENS = 2048  # a third more at 32 clients than its default of 256


@contextmanager
def loaded(given: Given) -> Iterator[Ready]:
    """Load the model."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = given.clients
    scheduler.max_num_batched_tokens = _STEP_TOKENS
    scheduler.enable_prefix_caching = False
    native = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    inference = "bf16" if "BF16" in native else "f32"
    properties = {"INFERENCE_PRECISION_HINT": inference, "INFERENCE_NUM_THREADS": given.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(given.model), scheduler, "CPU", properties)

    def generate(work: Work) -> int:
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.min_new_tokens = config.max_new_tokens = work.output_tokens
        waiting = list(enumerate(work.prompts))[::-1]
        running: list[openvino_genai.GenerationHandle] = []
        tokens = 0
        while waiting or running:
            while waiting and len(running) < work.clients:
                number, prompt = waiting.pop()
                ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
                running.append(pipeline.add_request(number, ids, config))
            pipeline.step()
            for handle in running:
                if handle.can_read():
                    tokens += sum(len(output.generated_ids) for output in handle.read().values())
            running = [handle for handle in running if handle.get_status() == openvino_genai.GenerationStatus.RUNNING]
        return tokens

    yield Ready(generate, of_openvino(given.mode, inference, Path("/proc/cpuinfo").read_text(encoding="utf-8")))


if __name__ == "__main__":
    serve(loaded, ["openvino", "openvino-genai"])
