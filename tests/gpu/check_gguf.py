"""Layers of GGUF codes on CUDA: weights decoded to the bit, products against dense ones, and their speed."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.gguf_codes import CODED_FORMATS, Codes
from engine.backends.torch.cuda.coded_linear import MAX_NARROW_ROWS, CodedKernels, CodedLinear, CodedMatrix, round_rows
from engine.backends.torch.cuda.gguf_matrix import gguf_kernels_problem, gguf_matrix
from engine.config import ModelSpec
from engine.models.gguf.header import FORMATS
from tests.gpu.check_attention import microseconds
from tests.gpu.load import as_they_come, rate_rows, serving
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured, promise, skipped

SHAPES = ((4096, 4096), (1000, 14336))
"""Outputs and inputs of the matrices that are compared."""

TIMED = (14336, 4096)
ROWS = (1, 7, 16, 33, 64, 65, 200, 512)
DTYPES = (torch.float16, torch.bfloat16)
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
    for dtype in DTYPES:
        if problem := gguf_kernels_problem([device], dtype, name):
            yield promise(f"{name}: kernels", False, problem)
            return
    for outputs, inputs in SHAPES:
        matrix, weight = stored_matrix(name, outputs, inputs, device)
        yield decoded_row(name, matrix, weight)
        for dtype in DTYPES:
            yield product_row(name, matrix, weight, dtype, ROWS)


def stored_matrix(name: str, outputs: int, inputs: int, device: torch.device) -> tuple[CodedMatrix, Tensor]:
    """Return random codes laid out on `device`, their scales below 1, and as the CPU decodes them."""
    block = next(each for each in FORMATS.values() if each.name == name)
    shape = (outputs, inputs // block.values * block.num_bytes)
    raw = torch.randint(60, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return gguf_matrix(raw, Codes(name, outputs, inputs), device), dequantise(raw, name)


def decoded_row(name: str, matrix: CodedMatrix, weight: Tensor) -> Row:
    """Whether the weights are decoded to the numbers of the CPU's reader, in float16."""
    device = matrix.low.device
    found = torch.empty(matrix.rows, matrix.inputs, dtype=torch.float16, device=device)
    CodedKernels(device).decode(matrix, 0, found)
    expected = weight if matrix.order is None else weight[:, matrix.order.cpu().long()]
    wrong = int((found.cpu().view(torch.int16) != expected.half().view(torch.int16)).sum())
    return promise(_title(name, matrix, "weights equal"), not wrong, f"{wrong} of {found.numel()} differ")


def product_row(name: str, matrix: CodedMatrix, weight: Tensor, dtype: torch.dtype, rows: Sequence[int]) -> Row:
    """Whether products are those of the decoded weights, summed in float64."""
    device = matrix.low.device
    exact_weight = weight.to(device, torch.float64)
    layer = CodedLinear(CodedKernels(device), [matrix], dtype)
    worst = 0.0
    for count in rows:
        x = torch.randn(count, matrix.inputs, generator=torch.Generator().manual_seed(count)).to(device, dtype)
        used = x.double()
        if count > MAX_NARROW_ROWS and matrix.rounds_x and layer.kernels.multiplies_floats:
            floats, scale = round_rows(x)
            used = floats.double() * scale.double()
        exact = used @ exact_weight.T
        # Above `Layout.max_rows` weights are rounded too; all errors are relative to what is summed.
        spread = (used.square() @ exact_weight.T.square()).sqrt() + exact.abs()
        worst = max(worst, float(((layer(x).double() - exact).abs() / spread).max()))
    limit = 4 * _ROUNDING[dtype]
    title = _title(name, matrix, f"products in {str(dtype).removeprefix('torch.')}")
    return promise(title, worst <= limit, f"largest error, at most {limit:.2g}", value=worst)


def _title(name: str, matrix: CodedMatrix, what: str) -> str:
    return f"{name} {matrix.rows} x {matrix.inputs} {what}"


def _times(name: str, device: torch.device, rows: Sequence[int]) -> Iterable[Row]:
    return times(name, stored_matrix(name, *TIMED, device)[0], rows)


def times(name: str, matrix: CodedMatrix, rows: Sequence[int]) -> Iterable[Row]:
    """Microseconds of a product, with dense float16 for comparison, and the GB/s at which codes are read."""
    device = matrix.low.device
    layer = CodedLinear(CodedKernels(device), [matrix], torch.float16)
    dense = torch.randn(matrix.rows, matrix.inputs, device=device, dtype=torch.float16)
    for count in (*rows, 128, 256, 512):
        x = torch.randn(count, matrix.inputs, device=device, dtype=torch.float16)
        ours = microseconds(lambda x=x: layer(x))  # type: ignore[misc]
        theirs = microseconds(lambda x=x: torch.nn.functional.linear(x, dense))  # type: ignore[misc]
        detail = f"dense float16: {theirs:.0f} us; codes read at {matrix.nbytes / ours / 1e3:.0f} GB/s"
        yield measured(f"{name}, {count} rows", ours, "us", detail)


def _serve(place: Place, name: str) -> Iterator[Row]:
    from tools.synthetic_gguf import write_synthetic_gguf

    place.models.mkdir(parents=True, exist_ok=True)
    file = place.models / f"1b-{name}.gguf"
    write_synthetic_gguf("1b", name, file)
    yield from as_they_come(_rates(place, file))


async def _rates(place: Place, file: Path) -> AsyncGenerator[Row, None]:
    spec = ModelSpec(
        path=file,
        name="1b",
        backend="torch",
        device="cuda:0",
        dtype="float16",
        max_model_len=2048,
        kv_cache_tokens=max(place.clients) * 512,
    )
    async with serving(spec, max(place.clients)) as (engine, model):
        yield promise(f"{file.stem} is computed from its codes", model.linear.startswith("triton"), model.linear)
        async for row in rate_rows(place, (engine, model), file.stem, place.clients):
            yield row
