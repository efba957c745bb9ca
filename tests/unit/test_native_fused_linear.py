"""What comes before and after a native product in the same call: norms, residual sums, gates and wide results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.model_config import Activation
from engine.backends.torch.model.mlp import ACTIVATIONS
from engine.backends.torch.native.layer import FusedLinear, NativeLinear
from engine.backends.torch.native.library import NativeLibrary
from tests.fakes.native_libraries import LIBRARIES, native

pytestmark = pytest.mark.long

DTYPES = (torch.bfloat16, torch.float32)
ROWS = (1, 3, 5, 12, 13, 33, 70, 200)
SHAPES = ((64, 64), (70, 33), (34, 1030))  # outputs and inputs; half of the outputs is 32, 35 and 17


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype, interleaved: bool = False
) -> tuple[NativeLinear, Callable[[Tensor], Tensor]]:
    """A layer, and the product that it should give, in double."""
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=2)
    layer = NativeLinear.pack(library, weight, bias, interleaved=interleaved)
    return layer, lambda x: x.double() @ weight.double().T + bias.double()


def assert_rounded(found: Tensor, exact: Tensor, *, sums: float) -> None:
    """That only roundings lie between them: that of `found`, and those of sums of about that size in float32."""
    rounding = 2**-8 if found.dtype is torch.bfloat16 else 2**-20
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=sums * 2**-18)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_float32_weights_and_wide_results_are_those_of_double_rounded(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    layer, exact = packed(library, outputs, inputs, dtype)
    wide = FusedLinear(layer, out=torch.float32)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        assert_rounded(wide(x), exact(x), sums=inputs)
        assert torch.equal(layer(x), wide(x).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "norm_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_normed_in_float32_and_rounded_once(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype, norm_dtype: torch.dtype
) -> None:
    layer, _ = packed(library, outputs, inputs, dtype)
    norm, wide = random(inputs, dtype=norm_dtype).abs() + 0.5, FusedLinear(layer, out=torch.float32)
    fused = FusedLinear(layer, norm=norm, epsilon=1e-5, out=torch.float32)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows) * 3
        normed = F.rms_norm(x.float(), norm.shape, norm.float(), 1e-5).to(dtype)
        flips = 2**-7 * inputs**0.5 if dtype is torch.bfloat16 else 0.0  # inputs next to the middle of two numbers
        torch.testing.assert_close(fused(x), wide(normed), rtol=1e-5, atol=flips + inputs * 2**-18)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_added_to_a_residual_in_its_place(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    layer, exact = packed(library, outputs, inputs, dtype)
    fused = FusedLinear(layer, alpha=0.25)
    for rows in ROWS:
        x, residual = random(rows, inputs, dtype=dtype, seed=rows), random(rows, outputs, dtype=dtype, seed=3)
        expected = residual.double() + 0.25 * exact(x)
        assert fused(x, residual) is residual
        assert_rounded(residual, expected, sums=inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_first_half_gates_the_second(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype, activation: Activation
) -> None:
    layer, exact = packed(library, outputs, inputs, dtype, interleaved=True)
    fused = FusedLinear(layer, activation=activation)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        gate, up = exact(x).chunk(2, dim=1)
        assert_rounded(fused(x), ACTIVATIONS[activation](gate) * up, sums=inputs * float(up.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_interleaved_weights_without_a_gate_give_the_columns_in_their_places(
    library: NativeLibrary, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x = random(9, inputs, dtype=dtype, seed=5)
    interleaved, _ = packed(library, outputs, inputs, dtype, interleaved=True)
    plain, _ = packed(library, outputs, inputs, dtype)
    assert torch.equal(interleaved(x), plain(x))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_those_of_double_to_float32s_precision(library: NativeLibrary, activation: Activation) -> None:
    weight, bias = torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0])
    layer = NativeLinear.pack(library, weight, bias, interleaved=True)
    x = torch.cat((torch.linspace(-30, 30, 6001), torch.tensor([0.0, 1e-6, -1e-6, 80.0, 200.0]))).unsqueeze(1)
    found = FusedLinear(layer, activation=activation)(x)
    torch.testing.assert_close(found.double(), ACTIVATIONS[activation](x.double()), rtol=1e-6, atol=1e-6)
    assert FusedLinear(layer, activation=activation)(torch.tensor([[float("nan")]])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_wherever_it_lies_and_whoever_computes_it(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    layer, _ = packed(library, 230, 330, dtype, interleaved=True)
    norm, x = random(330, dtype=dtype), random(90, 330, dtype=dtype, seed=3)
    residual = random(90, 230, dtype=dtype, seed=4)
    gated, added = FusedLinear(layer, norm=norm, activation="gelu"), FusedLinear(layer, norm=norm, alpha=0.5)

    def both(first: int, last: int) -> Tensor:
        rows = slice(first, last)
        return torch.cat((gated(x[rows]), added(x[rows], residual[rows].clone())), dim=1)

    torch.set_num_threads(1)
    expected = both(0, 90)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 4, 7, 12, 13, 17, 32, 33, 64, 90):
            for first in (0, (90 - rows) // 2, 90 - rows):
                assert torch.equal(both(first, first + rows), expected[first : first + rows])


def test_what_multiplies_names_itself_when_a_row_does_not_fit(library: NativeLibrary) -> None:
    layer, _ = packed(library, 16, 32, torch.float32)
    for call in (layer, partial(FusedLinear(layer, alpha=2.0), residual=torch.zeros(1, 16))):
        with pytest.raises(ValueError, match="32 inputs of float32"):
            call(torch.zeros(1, 33))
