"""Native attention gives what plain attention gives, and the same bits however its work is cut up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.backends.torch.native.library import NativeLibrary
from engine.config import CacheBits
from tests.fakes.attending import Kernel, Shape, expected
from tests.fakes.native_libraries import ATTENDING, native

TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 5e-6}
BITS: tuple[CacheBits, ...] = (16, 8, 4)
SHAPES = {
    "one head of keys for three, whole heads turned": Shape(9, 3, 64, turned=64),
    "own keys for each head, none turned": Shape(4, 4, 16),
    "an odd number of vectors": Shape(4, 2, 48),
    "pages of 32": Shape(14, 2, 32, turned=32, page_tokens=32),
    "pages of 48, a part turned": Shape(4, 2, 80, turned=32, page_tokens=48),
    "less turned than a vector": Shape(4, 2, 64, turned=16),
    "normed heads": Shape(8, 4, 96, turned=96, normed=True),
    "a window within a page": Shape(6, 2, 64, window=7, turned=64),
    "a window over blocks, heads for many": Shape(20, 1, 64, window=130, turned=64),
    "a window of one key": Shape(2, 1, 32, window=1),
    "soft-capped": Shape(2, 1, 128, cap=30.0, turned=128),
    "soft-capped steeply, windowed and normed": Shape(4, 2, 256, window=100, cap=2.0, turned=256, normed=True),
}
CUTS: tuple[Sequence[int], ...] = ([1] * 9 + [291], [2, 30, 100, 3, 165], [150] + [1] * 150, [127, 1, 1, 127, 44])

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]),
]


@pytest.fixture(scope="module", params=ATTENDING)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_it_gives_what_plain_attention_gives_over_what_lies_in_the_pages_and_the_same_bits_in_any_chunks(
    library: NativeLibrary, dtype: torch.dtype, shape: Shape, bits: CacheBits
) -> None:
    kernel = Kernel(library, shape, dtype, bits)
    sequence = kernel.sequence(300)
    whole = kernel.whole(sequence, [300])
    plain = expected(shape, sequence.rows, kernel.kept(sequence))
    assert (whole.double() - plain).abs().max() <= TOLERANCES[dtype]
    for cuts in CUTS:
        assert torch.equal(kernel.whole(kernel.sequence(300), cuts), whole), cuts


@pytest.mark.parametrize("bits", BITS)
def test_neither_threads_nor_other_sequences_change_an_answer(
    library: NativeLibrary, dtype: torch.dtype, bits: CacheBits
) -> None:
    shape = Shape(9, 3, 64, turned=64)
    torch.set_num_threads(1)
    alone = Kernel(library, shape, dtype, bits)
    lengths = [400, 129, 128, 60, 3]
    before = [alone.whole(alone.sequence(length, seed=length), [length]) for length in lengths]
    torch.set_num_threads(2)
    together = Kernel(library, shape, dtype, bits)
    sequences = [together.sequence(length, seed=length) for length in lengths]
    first = together.feed(*((sequence, len(sequence.rows) - 2) for sequence in sequences))
    second = together.feed(*((sequence, 1) for sequence in sequences))
    third = together.feed(*((sequence, 1) for sequence in reversed(sequences)))[::-1]
    for parts in zip(before, first, second, third, strict=True):
        assert torch.equal(torch.cat(parts[1:]), parts[0])


@pytest.mark.parametrize(("bits", "window"), [*((bits, None) for bits in BITS), (16, 1024)])
def test_long_sequences_split_over_threads_give_the_same_bits(
    library: NativeLibrary, dtype: torch.dtype, bits: CacheBits, window: int | None
) -> None:
    shape, tokens = Shape(4, 1, 32, window=window, turned=32), 2200
    found = []
    for threads, cuts in ((1, [tokens]), (1, [2150, 48, 1, 1]), (2, [2150, 48, 1, 1]), (7, [1000, 1000, 150, 50])):
        torch.set_num_threads(threads)
        kernel = Kernel(library, shape, dtype, bits)
        sequence = kernel.sequence(tokens)
        found.append(kernel.whole(sequence, cuts))
        plain = expected(shape, sequence.rows, kernel.kept(sequence))
        assert (found[-1].double() - plain).abs().max() <= TOLERANCES[dtype]
    assert all(torch.equal(each, found[0]) for each in found)


def test_scores_too_far_apart_for_their_exponentials_leave_the_highest(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    kernel = Kernel(library, Shape(2, 1, 16), dtype)
    sequence = kernel.sequence(200)
    sequence.rows[:, 0] = 40.0
    sequence.rows[:, 2] = -40.0
    sequence.rows[131, 2] = 40.0
    attended = kernel.whole(sequence, [200]).view(200, 2, 16)
    assert torch.equal(attended[131:, 0], sequence.rows[131, 3].expand(69, -1))


def test_a_score_beyond_all_others_by_any_finite_number_leaves_its_value(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    kernel = Kernel(library, Shape(2, 1, 16), dtype)
    sequence = kernel.sequence(200)
    sequence.rows[:, 0] = 1e12
    sequence.rows[:, 2] = 0.0
    sequence.rows[131, 2] = 1e12
    attended = kernel.whole(sequence, [200]).view(200, 2, 16)
    assert torch.equal(attended[131:, 0], sequence.rows[131, 3].expand(69, -1))


@pytest.mark.parametrize("high", [0x7FC0, 0x7FFF, 0xFFC1])
def test_a_query_that_is_no_number_has_no_answer_whatever_its_bits(
    library: NativeLibrary, dtype: torch.dtype, high: int
) -> None:
    kernel = Kernel(library, Shape(2, 1, 16), dtype)
    sequence = kernel.sequence(200)
    bits = torch.tensor([high << 16 | 0xFFFF - (1 << 32 if high > 0x7FFF else 0)], dtype=torch.int64).to(torch.int32)
    sequence.rows[150, 0] = bits.view(torch.float32).to(dtype)
    attended = kernel.whole(sequence, [200]).view(200, 2, 16)
    assert attended[150, 0].isnan().all()
    attended[150, 0] = 0.0
    assert attended.isfinite().all()


def test_rows_of_another_kind_are_refused(library: NativeLibrary, dtype: torch.dtype) -> None:
    kernel = Kernel(library, Shape(2, 1, 16), dtype)
    sequence = kernel.sequence(4)
    sequence.rows = sequence.rows.half()
    with pytest.raises(ValueError, match=r"got rows of torch\.float16"):
        kernel.feed((sequence, 4))
