"""The EXL2 reader gives the weights of the format's rules bit for bit, and names what is malformed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.checkpoints.bit_packing import WIDTHS, unpack_columns, unpack_row_nibbles
from engine.backends.checkpoints.exl2 import Exl2Linear
from engine.errors import ModelLoadFailed
from tests.fakes.exl2_tensors import (
    Groups,
    dequantise_by_rules,
    pack_column,
    pack_matrix,
    pack_nibbles,
    random_exl2,
    unpack_column,
)

KEY = "model.layers.0.mlp.down_proj"
ALL_WIDTHS: Groups = [(8, 32), (6, 32), (5, 64), (4, 32), (3, 32), (2, 32)]
ROW_MULTIPLE = {8: 4, 6: 16, 5: 32, 4: 8, 3: 32, 2: 16}
"""Rows that fill whole words, by bits."""


def layer(tensors: dict[str, Tensor]) -> Exl2Linear:
    return Exl2Linear(KEY, **tensors)


def bits_of(matrix: Tensor) -> Tensor:
    """float16 as its bits: -0 differs from 0."""
    assert matrix.dtype == torch.float16
    return matrix.contiguous().view(torch.int16)


def assert_bit_for_bit(tensors: dict[str, Tensor], out_features: int, *, prescale: float = 1.0) -> None:
    found = layer(tensors).dequantise(out_features, prescale=prescale)
    expected = dequantise_by_rules(tensors, out_features, prescale=prescale)
    assert torch.equal(bits_of(found), bits_of(expected))


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_word_of_a_column_is_read_as_one_stream_of_bits(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31, (30, 5), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    words[:4, 0] = -1
    expected = [unpack_column(words[:, column].tolist(), bits) for column in range(5)]
    assert unpack_columns(words, bits).t().tolist() == expected


@pytest.mark.parametrize(("bits", "position"), [(3, 10), (3, 21), (5, 6), (5, 25), (6, 5), (6, 10)])
def test_a_value_that_straddles_two_words_is_read_whole(bits: int, position: int) -> None:
    assert position * bits // 32 != (position * bits + bits - 1) // 32
    value = (1 << bits) - 2
    values = [value if row == position else 0 for row in range(32)]
    words = torch.tensor(pack_column(values, bits), dtype=torch.int32).unsqueeze(1)
    assert unpack_columns(words, bits).flatten().tolist() == values


def test_the_scale_code_in_a_words_sign_bit_is_read_without_its_sign() -> None:
    row = [0, 1, 2, 3, 4, 5, 6, 15]
    words = pack_nibbles([row])
    assert words.item() < 0
    assert unpack_row_nibbles(words, 8).tolist() == [row]


def test_widths_mixed_in_one_matrix_are_read_bit_for_bit() -> None:
    assert_bit_for_bit(random_exl2(ALL_WIDTHS, 64), 64)


@pytest.mark.parametrize(("bits", "rows"), [(8, 4), (6, 16), (5, 32), (4, 8), (3, 32), (2, 16)])
def test_a_last_group_shorter_than_the_others_is_read(bits: int, rows: int) -> None:
    assert_bit_for_bit(random_exl2([(8, 64), (bits, 64), (bits, rows)], 32), 32)


@pytest.mark.parametrize("out_features", [1, 31, 33, 50])
def test_columns_of_padding_are_left_out(out_features: int) -> None:
    tensors = random_exl2([(4, 32)], out_features)
    assert_bit_for_bit(tensors, out_features)
    padding = layer(tensors).dequantise()[:, out_features:]
    assert padding.shape[1] == -out_features % 32
    assert not padding.any()


@pytest.mark.parametrize("scale_max", [(1e-7, 2e-3), (1e-4, 1.5e-2), (60000.0, 65504.0)])
def test_scales_that_are_subnormal_or_huge_are_rounded_as_the_library_rounds_them(
    scale_max: tuple[float, float],
) -> None:
    assert_bit_for_bit(random_exl2([(8, 32), (5, 32), (2, 32)], 32, scale_max=scale_max), 32)


@pytest.mark.parametrize("prescale", [0.0625, 1.3])
def test_a_prescale_goes_into_the_groups_maximum_before_it_is_rounded(prescale: float) -> None:
    assert_bit_for_bit(random_exl2([(6, 32), (3, 32)], 32), 32, prescale=prescale)


def test_an_input_row_lies_where_the_inverse_permutation_says() -> None:
    codes = [[row] * 32 for row in range(16)]
    tensors = random_exl2([(4, 16)], 32) | {
        "q_weight": pack_matrix(codes, 4),
        "q_scale": pack_nibbles([[0] * 32]),
        "q_scale_max": torch.tensor([256.0]).half(),
    }
    weight = layer(tensors).dequantise()
    assert weight[:, 0].tolist() == [row - 8 for row in tensors["q_invperm"].tolist()]


def test_a_permutation_of_more_rows_than_an_int16_counts_is_followed() -> None:
    rows = 32800
    tensors = random_exl2([(4, 32)], 32)
    tensors["q_weight"] = torch.arange(rows // 8, dtype=torch.int32).unsqueeze(1).expand(-1, 32).contiguous()
    tensors["q_invperm"] = torch.arange(rows, dtype=torch.int32).flip(0)
    forward = layer(tensors | {"q_invperm": torch.arange(rows, dtype=torch.int32)}).dequantise()
    assert torch.equal(layer(tensors).dequantise(), forward.flip(0))


def test_a_bias_is_kept_beside_the_matrix_and_changes_nothing_in_it() -> None:
    tensors = random_exl2([(4, 32)], 32, bias=True)
    biased = layer(tensors)
    assert biased.bias is tensors["bias"]
    assert torch.equal(biased.dequantise(), replace(biased, bias=None).dequantise())


@st.composite
def groups_of_any_widths(draw: st.DrawFn) -> list[tuple[int, int]]:
    widths = sorted(draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=4)), reverse=True)
    return [(bits, draw(st.integers(1, 2)) * ROW_MULTIPLE[bits]) for bits in widths]


@settings(max_examples=25, deadline=None)
@given(
    groups=groups_of_any_widths(), out_features=st.integers(1, 40), seed=st.integers(0, 2**32), log=st.floats(-20, 15)
)
def test_any_layer_is_read_bit_for_bit(groups: Groups, out_features: int, seed: int, log: float) -> None:
    tensors = random_exl2(groups, out_features, seed=seed, scale_max=(2.0**log, 2.0 ** (log + 1)))
    assert_bit_for_bit(tensors, out_features)


def halved(groups: list[int]) -> Tensor:
    return torch.tensor(groups, dtype=torch.int16)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"q_groups": halved([7, 0, 4, 8])}, r"q_groups .* group 0 has values of 7 bits"),
        ({"q_groups": halved([0, 0, 4, 8])}, r"q_groups .* group 0 has values of 0 bits"),
        ({"q_groups": halved([4, 0, 8, 4])}, r"q_groups .* group 1 has 8 bits after one of 4"),
        ({"q_groups": halved([8, 1, 4, 8])}, r"q_groups .* group 0 begins at word row 1"),
        ({"q_groups": halved([8, 0, 4, 0])}, r"q_groups .* group 0 begins at word row 0 and ends at 0"),
        ({"q_groups": halved([8, 0, 4, 99])}, r"q_groups .* group 1 begins at word row 99 and ends at 12"),
        ({"q_groups": halved([8, 0, 4, -4])}, r"q_groups .* group 0 begins at word row 0 and ends at -4"),
        ({"q_groups": halved([8, 0, 3, 8])}, r"q_groups .* group 1 has 4 word rows"),
        ({"q_groups": halved([8, 0, 4, 4])}, r"q_groups makes 80 input rows; q_invperm has 64"),
        ({"q_groups": halved([8, 0, 4])}, r"q_groups is 3; its layer makes it 4"),
        ({"q_groups": torch.zeros(4, dtype=torch.int32)}, r"q_groups is stored as I32; it must be I16"),
        ({"q_invperm": torch.zeros(64, dtype=torch.int32)}, r"q_invperm is not a permutation of 64 rows"),
        ({"q_invperm": torch.arange(1, 65, dtype=torch.int32)}, r"q_invperm is not a permutation of 64 rows"),
        ({"q_scale": torch.zeros(2, 5, dtype=torch.int32)}, r"q_scale is 2 x 5; its layer makes it 2 x 4"),
        ({"q_scale": torch.zeros(3, 4, dtype=torch.int32)}, r"q_scale is 3 x 4; its layer makes it 2 x 4"),
        ({"q_scale_max": torch.zeros(2)}, r"q_scale_max is stored as F32"),
        ({"q_weight": torch.zeros(64)}, r"q_weight is 64; its layer makes it"),
        ({"q_weight": torch.zeros(12, 32)}, r"q_weight is stored as F32; it must be I32"),
        ({"bias": torch.zeros(31)}, r"bias is 31; its layer makes it 32"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    tensors = random_exl2([(8, 32), (4, 32)], 32)
    with pytest.raises(ModelLoadFailed, match=rf"{KEY}\.{named}".replace("model.layers", r"model\.layers")):
        layer(tensors | changed)
