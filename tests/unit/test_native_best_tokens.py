"""The native search for the likeliest tokens finds what torch finds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from engine.backends.common.native_build import InstructionSet
from engine.backends.sampling.sampler import best_tokens
from tests.fakes.native_libraries import SETS, native_set

pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels do not run here")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 1024, 1025, 5003])
@pytest.mark.parametrize("isa", SETS)
def test_it_finds_the_lowest_id_among_the_highest_logits(isa: InstructionSet, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (9, vocab), generator=generator).float()  # most rows have equals
    logits[4] *= 0.0  # of both signs, which are equal
    logits[5] -= 1e30
    assert torch.equal(native_set(isa).best_tokens(logits), best_tokens(logits))
    assert torch.equal(native_set(isa).best_tokens(logits[::2]), best_tokens(logits[::2]))


@pytest.mark.parametrize("place", [0, 20, 1023, 1024, 2990, 2999])
@pytest.mark.parametrize("isa", SETS)
def test_a_row_without_a_finite_highest_logit_has_no_token(isa: InstructionSet, place: int) -> None:
    logits = torch.zeros(5, 3000)
    logits[0, place], logits[1, place], logits[2, place] = math.nan, math.inf, -math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, place] = -7.0
    expected = [-1, -1, int(place == 0), -1, place]
    assert native_set(isa).best_tokens(logits).tolist() == expected == best_tokens(logits).tolist()


@pytest.mark.parametrize("isa", SETS)
def test_no_rows_have_no_tokens(isa: InstructionSet) -> None:
    assert native_set(isa).best_tokens(torch.zeros(0, 100)).tolist() == []
