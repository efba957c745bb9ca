"""The CUDA layers of a GGUF file's codes multiply by its decoded numbers and take its size. On a machine without a GPU,
the Triton kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.common.gguf_codes import CODED_FORMATS, Codes, triton_problem
from engine.backends.torch.cuda import coded_linear, gguf_matrix
from engine.backends.torch.cuda.coded_linear import (
    MAX_CODED_ROWS,
    MAX_NARROW_ROWS,
    CodedKernels,
    CodedLinear,
    GgufEmbedding,
    split_count,
)
from engine.backends.torch.cuda.gguf_matrix import gguf_kernels_problem
from engine.backends.torch.cuda.gguf_matrix import gguf_matrix as matrix_of
from engine.models.gguf.header import FORMATS

pytestmark = pytest.mark.long
pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS = {block.name: block for block in FORMATS.values()}
HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Where a block has floats of 16 bits, if not in its first two places."""
SCALES = (0.0, 2.0**-24, 1e-4, 0.02, 1.0, 60000.0)
DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE.type == "cuda" else 2**-7}
"""Of a result. Triton's interpreter cuts float32 off to bfloat16."""


def random_codes(name: str, rows: int, inputs: int, *, scale: float = 0.02, seed: int = 1) -> tuple[Tensor, Codes]:
    """Any bytes, with scales of up to `scale`."""
    block, draw = BLOCKS[name], np.random.default_rng(seed)
    raw = draw.integers(0, 256, (rows, inputs // block.values, block.num_bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0, 2)):
        raw[:, :, at : at + 2] = draw.uniform(-scale, scale, (*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1)), Codes(name, rows, inputs)


def theirs(raw: Tensor, name: str) -> Tensor:
    """The numbers as the package gguf has them, float32."""
    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[name]))


def layer_of(
    *parts: tuple[Tensor, Codes], dtype: torch.dtype, bias: Tensor | None = None, processors: int = 132
) -> tuple[CodedLinear, Tensor]:
    """A layer on a GPU of so many processors, and the numbers that it multiplies by, float32."""
    kernels = CodedKernels(DEVICE)
    object.__setattr__(kernels, "processors", processors)
    matrices = [matrix_of(raw, codes, DEVICE) for raw, codes in parts]
    return CodedLinear(kernels, matrices, dtype, bias), torch.cat([theirs(raw, codes.format) for raw, codes in parts])


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_products(layer: CodedLinear, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    """They are the exact sums, rounded once, but for the rounding of the sum in float32."""
    found = layer(x.to(DEVICE)).cpu()
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T  # of what is summed
    error = (found.double() - exact).abs()
    allowed = exact.abs() * ROUNDING[x.dtype] + size * 2**-18 + torch.finfo(x.dtype).smallest_normal
    if x.dtype is torch.float16:
        beyond = exact.abs() + allowed >= torch.finfo(torch.float16).max
        assert (found.abs()[beyond] > 30000).all()
        error = error[~beyond]
        allowed = allowed[~beyond]
    assert (error <= allowed).all()
    assert found.dtype == x.dtype


@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))  # each takes a second to interpret
@given(
    name=st.sampled_from(CODED_FORMATS),
    rows=st.integers(1, MAX_NARROW_ROWS),
    outputs=st.integers(1, 80),
    blocks=st.integers(1, 9),
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    processors=st.sampled_from((1, 132)),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_one_of_the_decoded_numbers(
    name: str,
    rows: int,
    outputs: int,
    blocks: int,
    scale: float,
    dtype: torch.dtype,
    biased: bool,
    processors: int,
    seed: int,
) -> None:
    inputs = BLOCKS[name].values * (1 + blocks // 5 if BLOCKS[name].values == 256 else blocks)
    bias = random(outputs, dtype=dtype) if biased else None
    part = random_codes(name, outputs, inputs, scale=scale, seed=seed)
    layer, weight = layer_of(part, dtype=dtype, bias=None if bias is None else bias.to(DEVICE), processors=processors)
    assert_products(layer, weight, random(rows, inputs, dtype=dtype, seed=seed), bias)


@pytest.mark.parametrize("name", CODED_FORMATS)
def test_inputs_that_are_split_over_programs_give_the_same_sums(name: str) -> None:
    inputs = 4 * max(128, BLOCKS[name].values)
    layer, weight = layer_of(random_codes(name, 17, inputs), dtype=torch.float16)
    assert split_count(1, layer.parts[0].groups // layer.parts[0].layout.step_groups, 264) == 2
    assert_products(layer, weight, random(3, inputs, dtype=torch.float16))


def test_a_row_of_x_that_is_not_finite_makes_its_own_products_so_alone() -> None:
    layer, _ = layer_of(random_codes("Q4_K", 20, 256), dtype=torch.float16)
    x = random(3, 256, dtype=torch.float16).to(DEVICE)
    clean = layer(x)
    x[1, 7] = torch.inf
    found = layer(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[0::2], clean[0::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [5, MAX_CODED_ROWS + 1])
def test_outputs_of_one_layer_may_be_of_several_formats(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_linear, "SLAB_BYTES", 2 * 256 * 10)  # slabs of ten rows
    parts = [random_codes(name, outputs, 256) for name, outputs in (("Q4_K", 24), ("Q6_K", 7), ("Q8_0", 12))]
    bias = random(43, dtype=dtype)
    layer, weight = layer_of(*parts, dtype=dtype, bias=bias.to(DEVICE))
    # Above, the weights are rounded to the dtype, as they are where they are decoded at load.
    used = weight if rows <= MAX_CODED_ROWS else decoded(weight, dtype)
    assert_products(layer, used, random(rows, 256, dtype=dtype), bias)


def decoded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the kernels round it, float32: the interpreter cuts it off to bfloat16."""
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        return (weight.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return weight.to(dtype).float()


def test_no_rows_are_no_products() -> None:
    layer, _ = layer_of(random_codes("Q4_0", 8, 64), dtype=torch.bfloat16)
    assert layer(torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)).shape == (0, 8)


def test_x_may_lie_in_memory_in_any_way() -> None:
    layer, _ = layer_of(random_codes("Q8_0", 8, 64), dtype=torch.float16)
    x = random(3, 128, dtype=torch.float16).to(DEVICE)[:, ::2]
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float16), (64, torch.bfloat16)])
def test_x_of_another_width_or_dtype_is_refused(width: int, dtype: torch.dtype) -> None:
    layer, _ = layer_of(random_codes("Q8_0", 8, 64), dtype=torch.float16)
    with pytest.raises(ValueError, match=r"a layer of 64 inputs of torch.float16 got \(1, "):
        layer(torch.zeros(1, width, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *[torch.bfloat16] * torch.cuda.is_available()], ids=str
)
@pytest.mark.parametrize("name", CODED_FORMATS)
def test_any_bytes_are_decoded_to_the_numbers_of_gguf_to_the_bit(name: str, dtype: torch.dtype) -> None:
    block = BLOCKS[name]
    inputs = block.values * (2 if block.values == 256 else 5)
    raw = torch.from_numpy(
        np.random.default_rng(3).integers(0, 256, (20, inputs // block.values * block.num_bytes), dtype=np.uint8)
    )
    with np.errstate(all="ignore"):
        expected = theirs(raw, name).to(dtype)
    matrix = matrix_of(raw, Codes(name, 20, inputs), DEVICE)
    found = torch.empty(13, inputs, dtype=dtype, device=DEVICE)
    CodedKernels(DEVICE).decode(matrix, 7, found)
    assert same_bits(found.cpu(), expected[7:])
    ids = torch.randint(20, (35,), generator=torch.Generator().manual_seed(0))
    embedding = GgufEmbedding(CodedLinear(CodedKernels(DEVICE), [matrix], dtype))
    assert same_bits(embedding(ids.to(DEVICE)).cpu(), expected[ids])
    assert embedding(ids[:0].to(DEVICE)).shape == (0, inputs)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether all bits are the same, but that any NaN is another."""
    bits = {2: torch.int16, 4: torch.int32}[expected.itemsize]
    same = found.view(bits) == expected.view(bits)
    return bool((same | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", CODED_FORMATS)
@pytest.mark.parametrize("inputs", [256, 2048, 4096 + 32])
def test_a_matrix_takes_what_the_file_does(name: str, inputs: int) -> None:
    block = BLOCKS[name]
    if inputs % block.values:
        pytest.skip("no whole blocks")
    raw, codes = random_codes(name, 9, inputs)
    matrix = matrix_of(raw, codes, DEVICE)
    assert matrix.nbytes == codes.cuda_bytes
    assert raw.nbytes <= matrix.nbytes <= raw.nbytes + 9 * 16  # where the last pair of groups lacks one
    assert matrix.nbytes <= 1.01 * raw.nbytes
    if inputs % 64 == 0:
        assert matrix.nbytes == raw.nbytes


def test_a_matrix_that_is_laid_out_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CODED_FORMATS:
        raw, codes = random_codes(name, 11, 512)
        whole = matrix_of(raw, codes, DEVICE)
        monkeypatch.setattr(gguf_matrix, "_PACK_VALUES", 3 * 512)
        for found, expected in zip(matrix_of(raw, codes, DEVICE).arrays, whole.arrays, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("programs", "steps", "wanted", "parts"),
    [(64, 16, 264, 4), (1000, 16, 264, 1), (1, 1, 264, 1), (2, 100, 264, 16), (64, 3, 264, 1), (64, 16, 2, 1)],
)
def test_inputs_are_split_as_far_as_the_gpu_has_room_and_each_part_has_two_steps(
    programs: int, steps: int, wanted: int, parts: int
) -> None:
    assert split_count(programs, steps, wanted) == parts


# Whether they are used.


@pytest.fixture
def small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is quick to interpret."""
    monkeypatch.setattr(gguf_matrix, "TRIAL_ROWS", 12)
    monkeypatch.setattr(gguf_matrix, "TRIAL_INPUTS", 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("small_trial")
def test_kernels_that_work_have_no_problem(dtype: torch.dtype) -> None:
    assert gguf_kernels_problem([DEVICE], dtype, "Q4_K") == ""


@pytest.mark.usefixtures("small_trial")
def test_kernels_that_compute_something_else_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = CodedKernels.multiply

    def halved(self: CodedKernels, x: Tensor, *more: Any) -> None:
        multiply(self, x / 2, *more)

    monkeypatch.setattr(CodedKernels, "multiply", halved)
    assert gguf_kernels_problem([DEVICE], torch.float16, "Q8_0") == (
        f"products with Q8_0 differ from those with the decoded numbers on {DEVICE}"
    )


def test_kernels_that_do_not_compile_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CodedKernels, *arguments: Any) -> None:
        raise RuntimeError("Python.h: no such file\nand more")

    monkeypatch.setattr(CodedKernels, "look_up", broken)
    assert gguf_kernels_problem([DEVICE], torch.float16, "Q6_K") == (
        f"the kernels for Q6_K fail on {DEVICE}: RuntimeError: Python.h: no such file"
    )


def test_a_lost_device_is_no_problem_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: CodedKernels, *arguments: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(CodedKernels, "look_up", lost)
    with pytest.raises(RuntimeError, match="CUDA error"):
        gguf_kernels_problem([DEVICE], torch.float16, "Q6_K")


def test_code_that_an_old_driver_does_not_take_is_a_problem_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: CodedKernels, *arguments: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(CodedKernels, "look_up", refused)
    assert gguf_kernels_problem([DEVICE], torch.float16, "Q6_K").endswith("device kernel image is invalid")


def test_a_card_before_ampere_decodes_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert gguf_kernels_problem([torch.device("cuda:0")], torch.float16, "Q4_K") == (
        "Triton needs compute capability 8.0, not 7.5"
    )


def test_a_machine_without_triton_or_its_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_problem() == ""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert gguf_kernels_problem([DEVICE], torch.float16, "Q4_K") == ("no C compiler for Triton is on PATH (clang, gcc)")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_problem() == "triton is not installed"
