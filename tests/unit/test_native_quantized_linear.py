"""Products with quantised weights are those of the codes, whatever the shape, the batch, the threads and the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.backends.common.packed_weights import GROUP_INPUTS, Bits, packed_bytes
from engine.backends.torch.native.layer import FusedLinear, NativeLinear, bits_of, quantise_linear
from engine.backends.torch.native.library import NativeLibrary
from tests.fakes.native_libraries import LIBRARIES, native

CODES = torch.tensor([-108, -84, -67, -52, -39, -26, -14, -3, 10, 22, 35, 49, 63, 80, 101, 127]).float()


def weight_of(layer: NativeLinear) -> Tensor:
    """The weight [out, in] that `layer` multiplies by, in float32."""
    form, bits = layer.format, bits_of(layer.format)
    assert bits is not None
    group, half = GROUP_INPUTS[bits], -(-form.outputs // 2 // 16) * 16
    groups = -(-form.inputs // group)
    blocks = 2 * half // 16 if form.interleaved else -(-form.outputs // 16)
    split = blocks * groups * 16 * group * bits // 8
    scales = layer.weight[split:].view(torch.bfloat16).view(blocks, groups, 16).float()
    if bits == 8:
        stored = layer.weight[:split].view(blocks, groups, group // 4, 16, 4)
        signed = layer.library.isa in ("amx-bf16", "avx2")
        codes = stored.view(torch.int8).float() if signed else stored.float() - 128
    else:
        both = layer.weight[:split].view(blocks, groups, group // 8, 16, 4)
        codes = CODES[torch.stack((both & 15, both >> 4), dim=3).long()].view(blocks, groups, group // 4, 16, 4)
    values = codes.permute(0, 3, 1, 2, 4).reshape(blocks, 16, groups, group) * scales.permute(0, 2, 1).unsqueeze(-1)
    rows = values.reshape(blocks, 16, groups * group)[:, :, : form.inputs]
    if not form.interleaved:
        return rows.reshape(blocks * 16, form.inputs)[: form.outputs]
    parts = (rows[start::2].reshape(half, form.inputs)[: form.outputs // 2] for start in (0, 1))
    return torch.cat(tuple(parts))


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows [rows, in] as products read them: each group as whole numbers up to 127 times a scale; in float64."""
    rows, inputs = x.shape
    padded = torch.zeros(rows, -(-inputs // group) * group)
    padded[:, :inputs] = x.float()
    groups = padded.view(rows, padded.shape[1] // group, group)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (groups * inverse).round().double()
    return (codes * (largest / 127.0).double()).flatten(1)[:, :inputs]


pytestmark = pytest.mark.long

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 31, 48, 70, 200, 401)
SHAPES = ((64, 64), (48, 96), (1, 1), (17, 33), (100, 71), (35, 1024), (576, 130), (80, 2050))
BITS: tuple[Bits, ...] = (8, 4)
both_bits = pytest.mark.parametrize("bits", BITS)


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@both_bits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_is_that_of_codes_and_scales(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype, bits: Bits
) -> None:
    bias = random(outputs, seed=2).to(dtype)
    layer = quantise_linear(library, random(outputs, inputs).to(dtype), bias, bits)
    weight, wide = weight_of(layer), FusedLinear(layer, out=torch.float32)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows).to(dtype)
        exact = rounded(x, GROUP_INPUTS[bits]) @ weight.double().T + bias.double()
        torch.testing.assert_close(wide(x).double(), exact, atol=1e-5 * inputs**0.5, rtol=1e-5)
        torch.testing.assert_close(layer(x), wide(x).to(dtype), atol=0, rtol=0)


@both_bits
@pytest.mark.parametrize("gates", [False, True], ids=["one after the other", "in turns"])
def test_a_weight_in_parts_gets_the_codes_of_the_whole_one(library: NativeLibrary, bits: Bits, gates: bool) -> None:
    weight = random(150, 71)
    expected = quantise_linear(library, weight, None, bits, interleaved=gates).weight
    for sizes in ((75, 75), (1, 100, 49)):
        assert torch.equal(
            quantise_linear(library, weight.split(sizes), None, bits, interleaved=gates).weight, expected
        )


@both_bits
def test_neither_threads_nor_the_rest_of_the_batch_change_a_row(library: NativeLibrary, bits: Bits) -> None:
    layer = quantise_linear(library, random(200, 1000), random(200), bits)
    x = random(70, 1000, seed=3)
    torch.set_num_threads(1)
    expected = layer(x)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(layer(x), expected)
    for rows in range(1, 70):
        assert torch.equal(layer(x[:rows]), expected[:rows])


@both_bits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 700), (17, 33), (130, 130)])
def test_every_cpu_gives_the_same_to_the_bit(outputs: int, inputs: int, dtype: torch.dtype, bits: Bits) -> None:
    weight, x = random(outputs, inputs).to(dtype), random(200, inputs, seed=2).to(dtype)
    x[7], x[45, inputs - 1] = float("nan"), float("inf")
    first, *others = (quantise_linear(native(name), weight, None, bits) for name in LIBRARIES)
    for other in others:
        assert torch.equal(weight_of(first), weight_of(other))
    for rows in (*range(1, 71), 200):
        expected = first(x[:rows])
        for other in others:
            torch.testing.assert_close(other(x[:rows]), expected, rtol=0, atol=0, equal_nan=True)


@both_bits
@pytest.mark.parametrize("inner", [32, 40])
def test_gate_and_what_it_opens_may_take_turns(library: NativeLibrary, bits: Bits, inner: int) -> None:
    weight, x = random(2 * inner, 96), random(13, 96, seed=2)
    apart = quantise_linear(library, weight, None, bits)
    turns = quantise_linear(library, weight, None, bits, interleaved=True)
    assert torch.equal(turns(x), apart(x))
    gate, up = FusedLinear(apart, out=torch.float32)(x).chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).bfloat16()
    torch.testing.assert_close(FusedLinear(turns, activation="silu")(x), expected, atol=1e-2, rtol=1e-2)


@both_bits
def test_a_norm_before_it_and_a_residual_after_it_are_part_of_the_product(library: NativeLibrary, bits: Bits) -> None:
    layer, norm = quantise_linear(library, random(48, 96), None, bits), random(96, seed=5)
    x, residual = random(9, 96, seed=2), random(9, 48, seed=3)
    normed = torch.nn.functional.rms_norm(x.float(), (96,), norm.float(), 1e-6).bfloat16()
    expected = FusedLinear(layer, out=torch.float32)(normed) * 0.5 + residual.float()
    found = FusedLinear(layer, norm=norm, epsilon=1e-6, alpha=0.5)(x, residual.clone())
    torch.testing.assert_close(found, expected.bfloat16(), atol=5e-2, rtol=2e-2)


@both_bits
def test_what_is_not_finite_stays_in_its_row(library: NativeLibrary, bits: Bits) -> None:
    layer = quantise_linear(library, random(20, 130), None, bits)
    x = random(6, 130)
    expected = layer(x)
    x[2, 0], x[4, 129] = float("inf"), float("nan")
    changed = layer(x)
    assert not changed[[2, 4]].isfinite().any()
    kept = [0, 1, 3, 5]
    assert torch.equal(changed[kept], expected[kept])


@pytest.mark.parametrize(("bits", "most"), [(8, 0.0065), (4, 0.075)])
def test_rounding_loses_little_of_normally_distributed_weights(library: NativeLibrary, bits: Bits, most: float) -> None:
    weight = random(256, 512) * 0.02
    lost = weight_of(quantise_linear(library, weight, None, bits)) - weight.float()
    assert float(lost.norm() / weight.float().norm()) < most


@both_bits
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e30])
def test_weights_of_any_size_are_kept(library: NativeLibrary, bits: Bits, size: float) -> None:
    weight = random(40, 70) * size
    lost = weight_of(quantise_linear(library, weight, None, bits)).double() - weight.double()
    assert float(lost.norm()) <= 0.08 * float(weight.double().norm())


@both_bits
def test_threads_do_not_change_how_weights_are_rounded(library: NativeLibrary, bits: Bits) -> None:
    weight = random(330, 200)
    torch.set_num_threads(1)
    expected = quantise_linear(library, weight, None, bits).weight
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(quantise_linear(library, weight, None, bits).weight, expected)


@both_bits
def test_the_largest_weight_of_a_group_is_not_cut(library: NativeLibrary, bits: Bits) -> None:
    weight = torch.zeros(16, 64).bfloat16()
    weight[3, 5] = -1.7
    found = weight_of(quantise_linear(library, weight, None, bits))
    assert float(found[3, 5]) == pytest.approx(-1.7, rel=0.02)


@both_bits
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (34, 33), (100, 576)])
def test_a_layer_takes_what_is_foretold(
    library: NativeLibrary, outputs: int, inputs: int, gates: bool, bits: Bits
) -> None:
    layer = quantise_linear(library, random(outputs, inputs), None, bits, interleaved=gates)
    assert layer.weight.nbytes == packed_bytes(bits, outputs, inputs, gates=gates)
