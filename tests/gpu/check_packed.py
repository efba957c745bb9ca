"""Layers of GPTQ, AWQ and FP8 on CUDA: weights decoded to the bit, products against dense ones, and their speed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from engine.backends.checkpoints.awq import AwqLinear
from engine.backends.checkpoints.fp8 import Fp8Codes, dequantise
from engine.backends.checkpoints.gptq import GptqLinear
from engine.backends.common.gguf_codes import Codes
from engine.backends.common.packed_codes import ALL
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedMatrix
from engine.backends.torch.cuda.packed_matrix import packed_kernels_problem, packed_matrix
from tests.gpu.check_gguf import DTYPES, ROWS, SHAPES, TIMED, decoded_row, product_row, times
from tests.gpu.models import Method, packed_tensors
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, promise

KINDS: dict[str, tuple[Method, int, Codes]] = {
    "GPTQ, groups of 128, ordered": ("gptq-act-order", 128, Codes("GPTQ", 0, 0, 4, ordered=True)),
    "GPTQ, groups of 32, ordered": ("gptq-act-order", 32, Codes("GPTQ", 0, 0, 1, ordered=True)),
    "AWQ, groups of 64": ("awq", 64, Codes("AWQ", 0, 0, 2)),
    "AWQ, one group": ("awq", 0, Codes("AWQ", 0, 0, ALL)),
    "FP8, blocks of 128": ("fp8", 128, Codes("F8_E4M3", 0, 0, 4, 128)),
    "FP8, rows": ("fp8", 0, Codes("F8_E4M3", 0, 0, ALL, 1)),
    "FP8, rows, x too": ("fp8", 0, Codes("F8_E4M3", 0, 0, ALL, 1, rounds_x=True)),
}
"""How the weights are stored, the size of their groups (0 for all inputs), and what the kernels are compiled for."""


def checks(place: Place) -> Iterable[Row]:
    """Rows for each kind, then speeds."""
    device = torch.device("cuda:0")
    if torch.cuda.get_device_capability(device) >= (8, 9):
        yield promise("torch multiplies 8-bit floats", CodedKernels(device).multiplies_floats)
    for title in KINDS:
        yield from attempt(title, partial(_rows, title, device))
    for title in (
        "GPTQ, groups of 128, ordered",
        "AWQ, groups of 64",
        "FP8, blocks of 128",
        "FP8, rows, x too",
    ):
        yield from attempt(f"{title} speed", partial(_times, title, device, (1, 16) if place.quick else (1, 8, 32, 64)))


def _rows(title: str, device: torch.device) -> Iterable[Row]:
    kind = KINDS[title][2]
    for dtype in DTYPES:
        if problem := packed_kernels_problem([device], dtype, kind.kind):
            yield promise(f"{title}: kernels", False, problem)
            return
    for outputs, inputs in SHAPES:
        matrix, weight = stored_matrix(title, outputs, inputs, device)
        yield decoded_row(title, matrix, weight)
        for dtype in DTYPES:
            yield product_row(title, matrix, weight, dtype, ROWS)


def stored_matrix(title: str, outputs: int, inputs: int, device: torch.device) -> tuple[CodedMatrix, Tensor]:
    """Return a random weight laid out on `device`, and as the CPU's reader unpacks it."""
    method, size, kind = KINDS[title]
    tensors = packed_tensors(method, inputs, outputs, size or inputs, torch.Generator().manual_seed(1))
    codes = kind._replace(rows=outputs, inputs=inputs)
    if method == "fp8":
        stored = Fp8Codes(tensors["weight"], tensors["weight_scale_inv"], (size, size) if size else (1, inputs))
        matrix, weight = packed_matrix(stored, codes, device), dequantise(stored)
    else:
        layer = GptqLinear("layer", **tensors) if method != "awq" else AwqLinear("layer", **tensors)
        matrix, weight = packed_matrix((layer,), codes, device), layer.dequantise().T.float()
    assert matrix is not None, "its groups are of one size, and its numbers finite"
    return matrix, weight


def _times(title: str, device: torch.device, rows: tuple[int, ...]) -> Iterable[Row]:
    matrix, _ = stored_matrix(title, *TIMED, device)
    return times(title, matrix, rows)
