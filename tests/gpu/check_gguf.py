"""Layers of GGUF codes on CUDA: weights decoded to the bit, products against dense ones, and their speed."""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.gguf_codes import CODED_FORMATS, Codes
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear
from engine.backends.torch.cuda.gguf_matrix import gguf_kernels_problem, gguf_matrix
from engine.config import ModelSpec
from engine.models.gguf.header import FORMATS
from tests.gpu.check_attention import microseconds
from tests.gpu.load import engine_rate, requests_for, serving
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

SHAPES = ((4096, 4096), (1000, 14336))
"""Outputs and inputs of the matrices that are compared."""

TIMED = (14336, 4096)
_ROWS = (1, 7, 16, 33, 64, 65, 512)
_DTYPES = (torch.float16, torch.bfloat16)
_ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def checks(place: Place) -> Iterable[Row]:
    """Rows for each format, then speeds."""
    device = torch.device("cuda:0")
    for name in CODED_FORMATS:
        yield from attempt(name, partial(_rows, name, device))
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        yield from attempt(f"{name} speed", partial(_times, name, device, (1, 16) if place.quick else (1, 8, 32, 64)))
    if importlib.util.find_spec("gguf") is None:
        yield skipped("tokens per second", "the package gguf, which writes the model, is not installed")
        return
    for name in ("Q4_K", "Q8_0"):
        yield from attempt(f"1b {name}", partial(_serve, place, name))


def _rows(name: str, device: torch.device) -> Iterable[Row]:
    for dtype in _DTYPES:
        if problem := gguf_kernels_problem([device], dtype, name):
            yield promise(f"{name}: kernels", False, problem)
            return
    for outputs, inputs in SHAPES:
        yield decoded_row(name, outputs, inputs, device)
        for dtype in _DTYPES:
            yield product_row(name, outputs, inputs, dtype, device, _ROWS)


def random_rows(name: str, outputs: int, inputs: int) -> Tensor:
    """Random codes, uint8 [outputs, bytes of a row], all of whose scales are below 1."""
    block = next(each for each in FORMATS.values() if each.name == name)
    shape = (outputs, inputs // block.values * block.num_bytes)
    return torch.randint(60, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def decoded_row(name: str, outputs: int, inputs: int, device: torch.device) -> Row:
    """Whether the weights are decoded to the numbers of the CPU's reader, in float16."""
    raw = random_rows(name, outputs, inputs)
    found = torch.empty(outputs, inputs, dtype=torch.float16, device=device)
    CodedKernels(device).decode(gguf_matrix(raw, Codes(name, outputs, inputs), device), 0, found)
    wrong = int((found.cpu().view(torch.int16) != dequantise(raw, name).half().view(torch.int16)).sum())
    return promise(f"{name} {outputs} x {inputs} weights equal", not wrong, f"{wrong} of {found.numel()} differ")


def product_row(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, rows: Sequence[int]
) -> Row:
    """Whether products are those of the decoded weights, summed in float64."""
    raw = random_rows(name, outputs, inputs)
    weight = dequantise(raw, name).to(device, torch.float64)
    layer = CodedLinear(CodedKernels(device), [gguf_matrix(raw, Codes(name, outputs, inputs), device)], dtype)
    worst = 0.0
    for count in rows:
        x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(device, dtype)
        exact = x.double() @ weight.T
        # Above 64 rows weights are rounded too; all errors are relative to what is summed.
        spread = (x.double().square() @ weight.T.square()).sqrt() + exact.abs()
        worst = max(worst, float(((layer(x).double() - exact).abs() / spread).max()))
    limit = 4 * _ROUNDING[dtype]
    title = f"{name} {outputs} x {inputs} products in {str(dtype).removeprefix('torch.')}"
    return promise(title, worst <= limit, f"largest error, at most {limit:.2g}", value=worst)


def _times(name: str, device: torch.device, rows: Sequence[int]) -> Iterable[Row]:
    outputs, inputs = TIMED
    raw = random_rows(name, outputs, inputs)
    layer = CodedLinear(CodedKernels(device), [gguf_matrix(raw, Codes(name, outputs, inputs), device)], torch.float16)
    dense = torch.randn(outputs, inputs, device=device, dtype=torch.float16)
    for count in (*rows, 512):
        x = torch.randn(count, inputs, device=device, dtype=torch.float16)
        ours = microseconds(lambda x=x: layer(x))  # type: ignore[misc]
        theirs = microseconds(lambda x=x: torch.nn.functional.linear(x, dense))  # type: ignore[misc]
        yield measured(f"{name}, {count} rows", ours, "us", f"dense float16: {theirs:.0f} us")


def _serve(place: Place, name: str) -> list[Row]:
    from tools.synthetic_gguf import write_synthetic_gguf

    place.models.mkdir(parents=True, exist_ok=True)
    file = place.models / f"1b-{name}.gguf"
    write_synthetic_gguf("1b", name, file)
    return asyncio.run(_measure(place, file))


async def _measure(place: Place, file: Path) -> list[Row]:
    spec = ModelSpec(
        path=file,
        name="1b",
        backend="torch",
        device="cuda:0",
        dtype="float16",
        max_model_len=2048,
        kv_cache_tokens=max(place.clients) * 512,
    )
    rates: dict[int, list[float]] = {count: [] for count in place.clients}
    async with serving(spec, max(place.clients)) as (engine, model):
        first = 0
        for counted in place.rounds():
            for count, found in rates.items():
                rate = await engine_rate(engine, count, requests_for(count), first)
                first += requests_for(count)
                if counted:
                    found.append(rate)
    from_codes = promise(f"{file.stem} is computed from its codes", model.linear.startswith("triton"), model.linear)
    detail = f"{model.weights_bytes / 2**30:.2f} GiB of weights"
    return [from_codes] + [
        measured(f"{file.stem}, {count} requests", statistics.median(found), "tok/s", detail)
        for count, found in rates.items()
    ]
