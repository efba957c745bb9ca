"""The native kernel lays keys and values as the codes that HeadCodec makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.torch.native.library import NativeLibrary
from engine.config import CacheBits
from tests.fakes.attending import Attending, Kernel, Shape, seeded
from tests.fakes.coded_pages import Coded, hadamard_rotate, made
from tests.fakes.native_libraries import ATTENDING, native

TOKENS, CUTS = 150, (40, 1, 1, 90, 18)
NEAR_CODES, NEAR_SCALES = 2e-4, 2e-3
"""How near to the middle between two codes, or two float16, a number may go to either: what the order of a float32 sum
may change."""

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.parametrize("bits", [8, 4]),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]),
]


@pytest.fixture(scope="module", params=ATTENDING)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


def fed(library: NativeLibrary, size: int, dtype: torch.dtype, bits: CacheBits) -> tuple[Kernel, Attending]:
    """A sequence of keys and values that nothing turns before they are laid, not yet fed."""
    kernel = Kernel(library, Shape(4, 2, size, page_tokens=48), dtype, bits)
    return kernel, kernel.sequence(TOKENS)


def laid(kernel: Kernel, sequence: Attending) -> tuple[Coded, Tensor]:
    """Its keys and values as they lie once it was fed in chunks, and as they came."""
    kernel.whole(sequence, CUTS)
    return kernel.laid(sequence), sequence.rows[:, kernel.shape.heads :]


def near_a_tie(heads: Tensor, found: Coded, form: HeadFormat) -> tuple[Tensor, Tensor]:
    """Of which codes and of which scales the exact value is as near to another one as to that of HeadCodec."""
    exact = hadamard_rotate(heads, form).unflatten(-1, (-1, form.group))
    units = found.scales.double().unsqueeze(-1) * 2 ** (8 - form.bits)
    quotients = exact / units.masked_fill(units == 0, 1)
    scales = exact.abs().amax(-1) / 128
    mantissa, _ = scales.frexp()  # 11 bits of which a float16 keeps
    return _in_the_middle(quotients, NEAR_CODES).flatten(-2), _in_the_middle(mantissa * 2**11, NEAR_SCALES)


def _in_the_middle(numbers: Tensor, within: float) -> Tensor:
    return (numbers - numbers.floor() - 0.5).abs() < within


@pytest.mark.parametrize("size", [16, 48, 64, 80, 96, 128, 256])
def test_codes_and_scales_are_those_of_the_codec_but_for_ties(
    library: NativeLibrary, dtype: torch.dtype, bits: CacheBits, size: int
) -> None:
    kernel, sequence = fed(library, size, dtype, bits)
    found, heads = laid(kernel, sequence)
    wanted = made(heads, kernel.form)
    tied_codes, tied_scales = near_a_tie(heads, found, kernel.form)
    other = found.scales != wanted.scales
    assert not (other & ~tied_scales).any()
    assert other.float().mean() < 0.01
    differ = (found.codes != wanted.codes) & ~other.repeat_interleave(kernel.form.group, -1)
    assert not (differ & ~tied_codes).any()
    assert differ.float().mean() < 0.001
    steps = (found.codes.int() - wanted.codes.int()).abs() >> (8 - bits)
    assert steps.max() <= 1


@pytest.mark.parametrize("size", [16, 64, 256])
def test_where_sums_are_exact_the_codes_are_those_of_the_codec_to_the_bit(
    library: NativeLibrary, dtype: torch.dtype, bits: CacheBits, size: int
) -> None:
    kernel, sequence = fed(library, size, dtype, bits)
    sequence.rows = torch.randint(-20, 21, sequence.rows.shape, generator=seeded(1)).to(dtype)
    sequence.rows[::7] = 0
    found, heads = laid(kernel, sequence)
    wanted = made(heads, kernel.form)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.codes, wanted.codes)


def test_what_is_no_number_is_lost_to_its_own_head_alone(
    library: NativeLibrary, dtype: torch.dtype, bits: CacheBits
) -> None:
    kernel, sequence = fed(library, 64, dtype, bits)
    sequence.rows[20, 4, 7] = torch.nan
    sequence.rows[21, 6, 9] = torch.inf
    found, heads = laid(kernel, sequence)
    numbers = found.dequantise().isfinite()
    assert not numbers[20, 0].any() and not numbers[21, 2].any()
    numbers[20, 0] = numbers[21, 2] = True
    assert numbers.all()
    assert len(heads) == TOKENS


def test_numbers_too_small_for_a_scale_become_zero(library: NativeLibrary, dtype: torch.dtype, bits: CacheBits) -> None:
    kernel, sequence = fed(library, 64, dtype, bits)
    sequence.rows[:] = 1e-9
    found, _ = laid(kernel, sequence)
    assert not found.codes.any() and not found.scales.any()
