"""Host microseconds of the Triton kernels of a layer and of weights in codes, with a driver that computes nothing.

    python -m tools.cuda.layer_host [--rounds N] [--calls N]

Steps that are not recorded as CUDA graphs wait for these launches. As in `attention_host`: Triton's own launcher runs
in full, down to a stub in place of libcuda, with tensors in RAM. Medians of rounds of processor time; the sizes are
those of an 8B Llama, and of a mixture of 128 experts. Needs gcc.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from engine.backends.common.gguf_codes import Codes
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear, CodedMatrix
from engine.backends.torch.cuda.grouped_experts import CodedExperts, ExpertWeights, GroupedExperts, PlainExperts
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.torch.cuda.packed_matrix import random_matrix
from tests.fakes.triton_driver import activate
from tools.cuda.attention_host import HEAD_DIM, HEADS, KV_HEADS, microseconds

HIDDEN, INNER = 4096, 14336
EXPERTS, PER_TOKEN, EXPERT_HIDDEN, EXPERT_INNER = 128, 8, 2048, 768
CPU, FLOAT16 = torch.device("cpu"), torch.float16


def halves(*shape: int) -> torch.Tensor:
    """Return zeros in float16."""
    return torch.zeros(*shape, dtype=FLOAT16)


def layer_calls(ops: LayerOps, rows: int) -> dict[str, Callable[[], object]]:
    """Return the calls between a layer's products."""
    qkv, angles = halves(rows, HEADS + 2 * KV_HEADS, HEAD_DIM), (halves(rows, 1, HEAD_DIM), halves(rows, 1, HEAD_DIM))
    pages, slots = halves(4, 16, 2 * KV_HEADS, HEAD_DIM), torch.arange(rows)
    hidden, added, weight, both = halves(rows, HIDDEN), halves(rows, HIDDEN), halves(HIDDEN), halves(rows, 2 * INNER)
    return {
        "sum and norm": lambda: ops.add_norm(hidden, added, weight, 1e-6),
        "rotation and KV write": lambda: ops.rotate_and_write(qkv, HEADS, None, angles, pages, slots),
        "gate": lambda: ops.activate_gate(both, "silu"),
    }


def matrix(kernels: CodedKernels, codes: Codes) -> CodedMatrix:
    """Return any GPTQ or FP8 matrix."""
    return random_matrix(codes, kernels.device)[0]


def coded_calls(kernels: CodedKernels, rows: int) -> dict[str, Callable[[], object]]:
    """Return products from codes of one and of three matrices, the first with its inputs split over programs."""
    x, gptq = halves(rows, HIDDEN), Codes("GPTQ", HIDDEN, HIDDEN, 4)
    one = CodedLinear(kernels, [matrix(kernels, gptq)], FLOAT16)
    qkv = [matrix(kernels, gptq._replace(rows=outputs)) for outputs in (HIDDEN, HIDDEN // 4, HIDDEN // 4)]
    three = CodedLinear(kernels, qkv, FLOAT16)
    return {"GPTQ, 4096 outputs": lambda: one(x), "GPTQ, queries, keys and values": lambda: three(x)}


def mixtures(ops: LayerOps, kernels: CodedKernels) -> dict[str, GroupedExperts]:
    """Return the mixture in 16 bits and in codes; all experts are the same, which launches do not show."""
    up, down = halves(2 * EXPERT_INNER, EXPERT_HIDDEN), halves(EXPERT_HIDDEN, EXPERT_INNER)
    gptq = Codes("GPTQ", EXPERT_INNER, EXPERT_HIDDEN, 4)
    coded_up = CodedLinear(kernels, [matrix(kernels, gptq)] * 2, FLOAT16)
    coded_down = CodedLinear(kernels, [matrix(kernels, Codes("GPTQ", EXPERT_HIDDEN, EXPERT_INNER, 4))], FLOAT16)
    weights: dict[str, ExpertWeights] = {
        "128 experts": PlainExperts(ops, [up] * EXPERTS, [down] * EXPERTS, "silu"),
        "128 experts, GPTQ": CodedExperts(ops, [coded_up] * EXPERTS, [coded_down] * EXPERTS, "silu"),
    }
    return {name: GroupedExperts(ops, each, EXPERTS) for name, each in weights.items()}


def mixture_call(grouped: GroupedExperts, rows: int) -> Callable[[], object]:
    """Return the call of a mixture, routing included."""
    x, logits = halves(rows, EXPERT_HIDDEN), halves(rows, EXPERTS)
    return lambda: grouped(x, *grouped.route(logits, PER_TOKEN, normalised=True))


def main() -> None:
    """Measure, and print a line for each call."""
    parser = argparse.ArgumentParser(description="Host time of the Triton kernels of a layer and of weights in codes.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        driver = activate(Path(folder))
        ops, kernels = LayerOps(CPU), CodedKernels(CPU)
        calls: dict[str, Callable[[], object]] = {}
        for rows in (1, 32):
            found = layer_calls(ops, rows) | coded_calls(kernels, rows)
            found |= {name: mixture_call(each, rows) for name, each in mixtures(ops, kernels).items()}
            calls |= {f"{rows:2} rows, {name}": call for name, call in found.items()}
        for call in calls.values():
            call()  # compiles
        calls_us: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(given.rounds):
            for name, call in calls.items():
                calls_us[name].append(microseconds(call, given.calls))
        for name, each_us in calls_us.items():
            before = driver.launches
            calls[name]()
            median, least = statistics.median(each_us), min(each_us)
            print(f"{name:40} {median:6.1f} us, least {least:.1f}; {driver.launches - before} launches")


if __name__ == "__main__":
    main()
