"""CUDA layers of GPTQ, AWQ and FP8 weights multiply by the numbers that the readers unpack, and take the size that
headers promise. On a machine without a GPU, the Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.checkpoints.awq import AwqLinear
from engine.backends.checkpoints.fp8 import Fp8Codes, dequantise
from engine.backends.checkpoints.gptq import GptqLinear
from engine.backends.checkpoints.quantized_tensors import parts_of
from engine.backends.common.gguf_codes import CodedTensors, Codes
from engine.backends.common.packed_codes import ALL, packed_codes
from engine.backends.common.quant_config import Quantisation
from engine.backends.torch.cuda import coded_linear, packed_matrix
from engine.backends.torch.cuda.coded_linear import (
    MAX_CODED_ROWS,
    MAX_NARROW_ROWS,
    CodedKernels,
    CodedLinear,
    CodedMatrix,
    round_rows,
)
from engine.backends.torch.cuda.packed_matrix import packed_kernels_problem, random_matrix
from engine.backends.torch.cuda.packed_matrix import packed_matrix as matrix_of
from tests.fakes.awq_tensors import random_awq
from tests.fakes.fp8_tensors import random_fp8
from tests.fakes.gptq_tensors import random_gptq
from tests.fakes.recording import NoReads

pytestmark = pytest.mark.long
pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16)
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8 if DEVICE.type == "cuda" else 2**-7}
"""Of a result. Triton's interpreter cuts float32 off to bfloat16."""

_KINDS = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int32: "I32"}


def codes_of(tensors: Mapping[str, Tensor], declared: Quantisation | None = None) -> Codes | None:
    """What headers say of one layer, "layer"."""
    headers = {
        f"layer.{name}": (tuple(tensor.shape), _KINDS.get(tensor.dtype, "F16")) for name, tensor in tensors.items()
    }
    found = packed_codes(headers, declared).parts(["layer.weight"])
    return None if found is None else found[0]


def shuffled_groups(inputs: int, size: int, seed: int) -> list[int]:
    groups = [row // size for row in range(inputs)]
    random.Random(seed).shuffle(groups)
    return groups


def gptq(inputs: int, outputs: int, size: int, *, ordered: bool = False, seed: int = 0) -> tuple[CodedMatrix, Tensor]:
    """A matrix of random GPTQ tensors, and its weight [outputs, inputs] as the reader unpacks it, unrounded float32."""
    g_idx = shuffled_groups(inputs, size, seed) if ordered else None
    tensors = random_gptq(inputs, outputs, -(-inputs // size), seed=seed, g_idx=g_idx)
    return _four_bits(tensors, GptqLinear("layer", **tensors))


def awq(inputs: int, outputs: int, size: int, *, seed: int = 0) -> tuple[CodedMatrix, Tensor]:
    tensors = random_awq(inputs, outputs, inputs // size, seed=seed)
    return _four_bits(tensors, AwqLinear("layer", **tensors))


def _four_bits(tensors: Mapping[str, Tensor], layer: GptqLinear | AwqLinear) -> tuple[CodedMatrix, Tensor]:
    codes = codes_of(tensors)
    assert codes is not None
    matrix = matrix_of((layer,), codes, DEVICE)
    assert matrix is not None and matrix.nbytes <= codes.cuda_bytes
    groups = layer.row_groups()
    exact = (layer.codes().float() - layer.zeros().float()[groups]) * layer.scales.float()[groups]
    assert torch.equal(exact.half(), layer.dequantise())
    return matrix, exact.T


def fp8(
    inputs: int, outputs: int, block: tuple[int, int], *, kind: Any = "e4m3", seed: int = 0
) -> tuple[CodedMatrix, Tensor]:
    tensors = random_fp8(outputs, inputs, block, kind=kind, seed=seed)
    codes = codes_of(tensors, Quantisation("fp8", fp8_block=block))
    assert codes is not None
    stored = Fp8Codes(tensors["weight"], tensors["weight_scale_inv"], block)
    matrix = matrix_of(stored, codes, DEVICE)
    assert matrix is not None and matrix.nbytes == codes.cuda_bytes
    return matrix, dequantise(stored)


def layer_of(
    *matrices: CodedMatrix, dtype: torch.dtype, bias: Tensor | None = None, processors: int = 132
) -> CodedLinear:
    """A layer on a GPU of so many processors."""
    kernels = CodedKernels(DEVICE)
    object.__setattr__(kernels, "processors", processors)
    return CodedLinear(kernels, matrices, dtype, bias)


def draw(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_products(layer: CodedLinear, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    """They are the exact sums, rounded once, but for the rounding of the sum in float32."""
    found = layer(x.to(DEVICE)).cpu()
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T  # of what is summed
    allowed = exact.abs() * ROUNDING[x.dtype] + size * 2**-18 + torch.finfo(x.dtype).smallest_normal
    assert ((found.double() - exact).abs() <= allowed).all()
    assert found.dtype == x.dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the kernels round it, float32: the interpreter cuts it off to bfloat16."""
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        return (weight.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    return weight.to(dtype).float()


LAYERS = {
    "gptq 32": lambda rows, seed: gptq(160, rows, 32, seed=seed),
    "gptq 64 in order of groups": lambda rows, seed: gptq(192, rows, 64, ordered=True, seed=seed),
    "gptq 128 in order of groups": lambda rows, seed: gptq(320, rows, 128, ordered=True, seed=seed),
    "gptq one group": lambda rows, seed: gptq(96, rows, 96, seed=seed),
    "awq 32": lambda rows, seed: awq(96, rows, 32, seed=seed),
    "awq 128": lambda rows, seed: awq(512, rows, 128, seed=seed),
    "fp8 blocks of 128": lambda rows, seed: fp8(256 + 32, rows, (128, 128), seed=seed),
    "fp8 blocks of 48 x 64": lambda rows, seed: fp8(160, rows, (48, 64), seed=seed),
    "fp8 rows": lambda rows, seed: fp8(96, rows, (1, 96), seed=seed),
    "fp8 one scale": lambda rows, seed: fp8(96, rows, (rows, 96), seed=seed),
    "e5m2": lambda rows, seed: fp8(128, rows, (1, 128), kind="e5m2", seed=seed),
}


@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))  # each takes a second to interpret
@given(
    name=st.sampled_from(sorted(LAYERS)),
    rows=st.integers(1, MAX_NARROW_ROWS),
    words=st.integers(1, 10),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    processors=st.sampled_from((1, 132)),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_one_of_the_unpacked_weights(
    name: str, rows: int, words: int, dtype: torch.dtype, biased: bool, processors: int, seed: int
) -> None:
    outputs = 8 * words
    matrix, weight = LAYERS[name](outputs, seed)
    bias = draw(outputs, dtype=dtype) if biased else None
    layer = layer_of(matrix, dtype=dtype, bias=None if bias is None else bias.to(DEVICE), processors=processors)
    assert_products(layer, weight, draw(rows, weight.shape[1], dtype=dtype, seed=seed), bias)


@pytest.mark.parametrize("name", LAYERS)
def test_each_format_multiplies_on_its_own(name: str) -> None:
    matrix, weight = LAYERS[name](40, 3)
    assert_products(layer_of(matrix, dtype=torch.float16), weight, draw(3, weight.shape[1], dtype=torch.float16))


@pytest.mark.parametrize("processors", [1, 132], ids=["whole", "inputs split"])
@pytest.mark.parametrize("rows", [65, 130, MAX_CODED_ROWS])
@pytest.mark.parametrize("name", ["gptq 128 in order of groups", "awq 128", "fp8 blocks of 128", "fp8 rows", "e5m2"])
def test_codes_with_a_scale_for_each_step_are_multiplied_by_more_rows(name: str, rows: int, processors: int) -> None:
    matrix, weight = LAYERS[name](136, 3)
    assert matrix.layout.max_rows == MAX_CODED_ROWS
    x, bias = draw(rows, weight.shape[1], dtype=torch.float16), draw(136, dtype=torch.float16)
    layer = layer_of(matrix, dtype=torch.float16, bias=bias.to(DEVICE), processors=processors)
    assert_products(layer, weight, x, bias)


@pytest.mark.parametrize("name", ["gptq 32", "gptq 64 in order of groups", "fp8 blocks of 48 x 64"])
def test_codes_with_more_scales_are_decoded_for_many_rows(name: str) -> None:
    matrix, weight = LAYERS[name](40, 3)
    x = draw(MAX_NARROW_ROWS + 1, weight.shape[1], dtype=torch.float16)
    assert_products(layer_of(matrix, dtype=torch.float16), weight.half().float(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [5, MAX_CODED_ROWS + 1])
def test_outputs_of_one_layer_may_be_of_several_formats_and_orders(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_linear, "SLAB_BYTES", 2 * 128 * 10)  # slabs of ten rows
    parts = [
        gptq(128, 24, 64, ordered=True, seed=1),
        gptq(128, 8, 64, ordered=True, seed=1),
        awq(128, 16, 32),
        gptq(128, 8, 32, ordered=True, seed=2),
        fp8(128, 12, (1, 128)),
    ]
    weight = torch.cat([weight for _, weight in parts])
    bias = draw(len(weight), dtype=dtype)
    layer = layer_of(*(matrix for matrix, _ in parts), dtype=dtype, bias=bias.to(DEVICE))
    # Above, the weights are rounded to the dtype, as they are where they are unpacked at load.
    used = weight if rows <= MAX_CODED_ROWS else rounded(weight, dtype)
    assert_products(layer, used, draw(rows, 128, dtype=dtype), bias)
    assert layer.parts[0].order is layer.parts[1].order  # x is put in order once for both
    assert layer.parts[0].order is not layer.parts[3].order


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("fp8")])
def test_a_card_that_does_not_convert_e4m3_makes_its_numbers_from_their_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_matrix, "_converts_e4m3", lambda device: False)
    matrix, weight = LAYERS[name](40, 5)
    assert matrix.layout.floats == "e4m3_bits"
    assert_products(layer_of(matrix, dtype=torch.float16), weight, draw(3, weight.shape[1], dtype=torch.float16))
    found = torch.empty(40, matrix.inputs, dtype=torch.float32, device=DEVICE)
    CodedKernels(DEVICE).decode(matrix, 0, found)
    assert torch.equal(found.cpu(), weight)


@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_finite_8_bit_float_is_itself(kind: Any, converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "_converts_e4m3", lambda device: converts)
    most = 0x7E if kind == "e4m3" else 0x7B
    weight = torch.tensor([*range(most + 1), *range(0x80, 0x81 + most)], dtype=torch.uint8)
    weight = torch.nn.functional.pad(weight, (0, -len(weight) % 32)).view(1, -1)
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    stored = Fp8Codes(weight.view(dtype), torch.ones(1, 1), (1, weight.shape[1]))
    codes = Codes("F8_E4M3" if kind == "e4m3" else "F8_E5M2", 1, weight.shape[1], ALL)
    matrix = matrix_of(stored, codes, DEVICE)
    assert matrix is not None
    found = torch.empty(1, weight.shape[1], dtype=torch.float32, device=DEVICE)
    CodedKernels(DEVICE).decode(matrix, 0, found)
    assert torch.equal(found.cpu().view(torch.int32), stored.weight.float().view(torch.int32))


@pytest.mark.parametrize("name", [name for name in LAYERS if "order" not in name])
def test_weights_are_decoded_to_the_numbers_of_the_readers_to_the_bit(name: str) -> None:
    matrix, weight = LAYERS[name](40, 5)
    for dtype in (torch.float32, torch.float16):
        found = torch.empty(33, matrix.inputs, dtype=dtype, device=DEVICE)
        CodedKernels(DEVICE).decode(matrix, 7, found)
        assert torch.equal(found.cpu(), weight[7:].to(dtype))


def test_the_inputs_of_a_matrix_in_order_of_groups_are_those_of_the_file() -> None:
    matrix, weight = gptq(128, 16, 32, ordered=True)
    found = torch.empty(16, 128, dtype=torch.float16, device=DEVICE)
    CodedKernels(DEVICE).decode(matrix, 0, found)
    assert matrix.order is not None
    assert torch.equal(found.cpu(), weight[:, matrix.order.cpu().long()].half())


def test_a_weight_that_is_read_in_slabs_is_the_same() -> None:
    tensors = random_gptq(64, 24, 2, g_idx=shuffled_groups(64, 32, 0))
    codes = codes_of(tensors)
    assert codes is not None
    columns = {"qweight": 8, "scales": 8, "qzeros": 1}
    slabs = tuple(
        GptqLinear(
            "layer",
            **{
                name: tensor[:, at * columns[name] : (at + 1) * columns[name]] if name in columns else tensor
                for name, tensor in tensors.items()
            },
        )
        for at in range(3)
    )
    whole, found = matrix_of((GptqLinear("layer", **tensors),), codes, DEVICE), matrix_of(slabs, codes, DEVICE)
    assert whole is not None and found is not None
    for one, other in zip(whole.arrays, found.arrays, strict=True):
        assert torch.equal(one, other)


def test_a_product_can_be_recorded() -> None:
    layers = [layer_of(LAYERS[name](24, 1)[0], dtype=torch.float16) for name in LAYERS]
    for layer in layers:
        for rows in (3, MAX_CODED_ROWS + 1):
            with NoReads():
                layer(torch.zeros(rows, layer.parts[0].inputs, dtype=torch.float16, device=DEVICE))


# 8-bit floats by 8-bit floats.


def rounding_layer(block: tuple[int, int], dtype: torch.dtype, *, dynamic: bool = True) -> tuple[CodedLinear, Tensor]:
    tensors = random_fp8(32, 128, block)
    codes = codes_of(tensors, Quantisation("fp8", fp8_block=block, fp8_activations=dynamic))
    assert codes is not None
    stored = Fp8Codes(tensors["weight"], tensors["weight_scale_inv"], block)
    matrix = matrix_of(stored, codes, DEVICE)
    assert matrix is not None
    bias = draw(32, dtype=dtype)
    return layer_of(matrix, dtype=dtype, bias=bias.to(DEVICE)), dequantise(stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("block", [(1, 128), (32, 128)], ids=["rows", "one scale"])
def test_products_of_many_rows_are_those_with_x_in_8_bits_where_the_model_is_meant_so(
    block: tuple[int, int], converts: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_matrix, "_converts_e4m3", lambda device: converts)
    monkeypatch.setattr(coded_linear, "SLAB_BYTES", 4 * 70 * 16)  # slabs of 16 outputs
    layer, weight = rounding_layer(block, dtype)
    assert layer.kernels.multiplies_floats
    x = draw(70, 128, dtype=dtype)
    x[3] = 0
    floats, scale = round_rows(x)
    assert (floats.float() * scale - x.float()).abs().max() <= 2**-4 * x.float().abs().max()
    found, bias = layer(x.to(DEVICE)).cpu(), layer.bias
    assert bias is not None
    exact = (floats.double() * scale.double()) @ weight.double().T + bias.cpu().double()
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-7 + 2**-12).all()
    assert torch.equal(found[3], bias.cpu())
    # A few rows are multiplied as they are.
    assert_products(layer, weight, x[:5], bias.cpu())


def test_a_row_that_is_not_finite_makes_its_own_products_so_alone_in_8_bits() -> None:
    layer, _ = rounding_layer((1, 128), torch.float16)
    x = draw(70, 128, dtype=torch.float16).to(DEVICE)
    clean = layer(x)
    x[1, 7] = torch.inf
    found = layer(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[2:], clean[2:])


def test_a_card_for_which_torch_has_no_product_of_8_bit_floats_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`")

    coded_linear._multiplies_floats.cache_clear()
    monkeypatch.setattr(coded_linear, "multiply_floats", refused)
    try:
        assert not CodedKernels(DEVICE).multiplies_floats
    finally:
        coded_linear._multiplies_floats.cache_clear()


@pytest.mark.parametrize("reason", ["not declared", "not there", "a scale for a block of rows"])
def test_x_stays_as_it_is_where_the_model_or_the_device_has_no_8_bits_for_it(reason: str) -> None:
    block = (16, 128) if reason == "a scale for a block of rows" else (1, 128)
    layer, weight = rounding_layer(block, torch.float16, dynamic=reason != "not declared")
    if reason == "not there":
        object.__setattr__(layer.kernels, "multiplies_floats", False)
    assert layer.bias is not None
    assert_products(layer, weight, draw(70, 128, dtype=torch.float16), layer.bias.cpu())


# What is not computed from codes.


def test_groups_of_several_sizes_are_not_taken() -> None:
    tensors = random_gptq(64, 8, 2, g_idx=[0] * 24 + [1] * 40)
    codes = codes_of(tensors)
    assert codes is not None
    assert matrix_of((GptqLinear("layer", **tensors),), codes, DEVICE) is None


@pytest.mark.parametrize(("kind", "byte"), [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7C), ("e5m2", 0xFE)])
def test_floats_that_are_not_finite_are_not_taken(kind: Any, byte: int) -> None:
    tensors = random_fp8(8, 64, (1, 64), kind=kind)
    tensors["weight"].view(torch.uint8)[3, 5] = byte
    codes = codes_of(tensors, Quantisation("fp8", fp8_block=(1, 64)))
    assert codes is not None
    stored = Fp8Codes(tensors["weight"], tensors["weight_scale_inv"], (1, 64))
    assert matrix_of(stored, codes, DEVICE) is None


@pytest.mark.parametrize(
    ("inputs", "groups", "span"),
    [(128, 4, 1), (128, 2, 2), (256, 2, 4), (1024, 2, 16), (128, 1, ALL), (96 + 8, 1, None), (64, 4, None)],
)
def test_headers_show_which_gptq_layers_are_computed_from_codes(inputs: int, groups: int, span: int | None) -> None:
    codes = codes_of(random_gptq(inputs, 16, groups))
    assert (codes and codes.span) == span
    assert codes is None or codes == Codes("GPTQ", 16, inputs, codes.span)


@pytest.mark.parametrize(("inputs", "size", "span"), [(96, 32, 1), (192, 96, None), (256, 128, 4), (96, 96, ALL)])
def test_headers_show_which_awq_layers_are_computed_from_codes(inputs: int, size: int, span: int | None) -> None:
    codes = codes_of(random_awq(inputs, 16, inputs // size))
    assert (codes and codes.span) == span
    assert codes is None or codes == Codes("AWQ", 16, inputs, codes.span)


@pytest.mark.parametrize(
    ("block", "spans"), [((128, 128), (4, 128)), ((48, 40), None), ((48, 64), (2, 48)), ((1, 256), (ALL, 1))]
)
def test_headers_show_which_fp8_layers_are_computed_from_codes(
    block: tuple[int, int], spans: tuple[int, int] | None
) -> None:
    codes = codes_of(random_fp8(192, 256, block), Quantisation("fp8", fp8_block=block))
    assert codes == (None if spans is None else Codes("F8_E4M3", 192, 256, *spans))


def test_headers_without_scales_are_of_no_layer() -> None:
    four, eight = random_gptq(64, 8, 2), random_fp8(8, 64, (1, 64))
    del four["scales"], eight["weight_scale_inv"]
    assert codes_of(four) is None
    assert codes_of(eight) is None


@pytest.mark.parametrize("inputs", [4096, 11008])
def test_weights_of_four_bits_take_what_the_file_does_but_for_zero_points(inputs: int) -> None:
    words, groups, outputs = inputs // 8, inputs // 128, 4096
    headers = {
        "layer.qweight": ((words, outputs), "I32"),
        "layer.scales": ((groups, outputs), "F16"),
        "layer.qzeros": ((groups, outputs // 8), "I32"),
    }
    (codes,) = packed_codes(headers, None).parts(["layer.weight"]) or ()
    stored = 4 * words * outputs + 2 * groups * outputs + groups * outputs // 2
    assert codes.cuda_bytes == stored + groups * outputs // 2
    assert codes.cuda_bytes < 0.27 * 2 * codes.elements


def test_layers_of_which_a_part_is_not_quantised_are_decoded() -> None:
    headers = {f"q.{name}": (part.shape, part.kind) for name, part in parts_of(random_gptq(64, 8, 2)).items()}
    coded = packed_codes(headers | {"k.weight": ((8, 64), "F16")}, None)
    assert coded.parts(["q.weight"]) is not None
    assert coded.parts(["q.weight", "k.weight"]) is None
    assert isinstance(coded, CodedTensors)


# Whether they are used.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Codes("GPTQ", 0, 0, 4), Codes("AWQ", 0, 0, ALL), Codes("F8_E4M3", 0, 0, 4, 128)])
def test_kernels_that_work_have_no_problem(kind: Codes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "TRIAL_ROWS", 12)
    monkeypatch.setattr(packed_matrix, "TRIAL_INPUTS", 256)
    assert packed_kernels_problem([DEVICE], dtype, kind) == ""


def test_kernels_that_decode_something_else_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(codes: Codes, device: torch.device) -> tuple[CodedMatrix, Tensor]:
        matrix, weight = random_matrix(codes._replace(rows=12, inputs=256), device)
        matrix.small.add_(1)
        return matrix, weight

    monkeypatch.setattr(packed_matrix, "random_matrix", shifted)
    assert packed_kernels_problem([DEVICE], torch.float16, Codes("GPTQ", 0, 0, 4)) == (
        f"GPTQ is decoded to other numbers on {DEVICE}"
    )
