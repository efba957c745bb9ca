"""The EXL2 packer, held against a decoder that knows the format's rules alone and goes value by value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.fakes import exl2_tensors
from tools.exl2_writer.bit_allocation import WIDTHS, MatrixShape
from tools.exl2_writer.exl2_packing import measure_linear, pack_linear, round_groups, row_order, stored_shapes

MIXES = {
    **{f"{width} bits": (width,) * 3 for width in WIDTHS},
    "8 and 2": (8, 2, 2),
    "6, 5 and 4": (6, 5, 4),
    "widths that do not fall with importance": (3, 6, 4),
    "3 and 2": (3, 3, 2),
}
"""Bits of three groups of rows, most important first."""


def random_weight(columns: int, rows: int, *, seed: int = 0, scale: float = 0.02) -> Tensor:
    """[out, in] with rows of different sizes and some outliers, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(columns, rows, generator=generator) * scale
    weight *= torch.rand(rows, generator=generator) + 0.2
    return weight * (1 + 5 * (torch.rand(columns, rows, generator=generator) > 0.99))


def decoded(tensors: dict[str, Tensor], columns: int) -> Tensor:
    """[out, in], by the rules."""
    return exl2_tensors.dequantise_by_rules(tensors, columns).t().float()


def step_and_value(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Per weight, [in, stored columns]: its scale, its value as stored, and the largest value of its width."""
    flat = tensors["q_groups"].tolist()
    steps, values, largest = [], [], []
    for group, (bits, (start, end)) in enumerate(
        zip(flat[::2], pairwise([*flat[1::2], len(tensors["q_weight"])]), strict=True)
    ):
        words = tensors["q_weight"][start:end].t().tolist()
        columns = torch.tensor([exl2_tensors.unpack_column(column, bits) for column in words]).t()
        codes = torch.tensor(
            [
                ((tensors["q_scale"][group, column // 8].item() >> (4 * (column % 8))) & 15) + 1
                for column in range(columns.shape[1])
            ]
        )
        unit = (tensors["q_scale_max"][group].float() / 256).half()
        scale = ((codes**2).half() * unit).float()
        steps.append(scale.expand(columns.shape))
        values.append(columns)
        largest.append(torch.full_like(columns, 2**bits - 1))
    order = tensors["q_invperm"].long()
    return torch.cat(steps)[order], torch.cat(values)[order], torch.cat(largest)[order]


@pytest.mark.parametrize("widths", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("group_size", [32, 64])
def test_every_weight_is_within_half_a_step_or_clipped_at_the_end(widths: Sequence[int], group_size: int) -> None:
    weight = random_weight(40, 2 * group_size + 32)
    tensors = pack_linear(weight, widths, group_size=group_size).tensors
    steps, values, largest = (part[:, :40].t() for part in step_and_value(tensors))
    error = (decoded(tensors, 40) - weight).abs()
    rounding = weight.abs() * 2.0**-11  # of the product, to half precision
    clipped_below, clipped_above = values == 0, values == largest
    within = error <= steps * 0.5001 + rounding
    assert (within | clipped_below | clipped_above).all()
    assert (weight[~within & clipped_above] > 0).all()
    assert (weight[~within & clipped_below] < 0).all()


@pytest.mark.parametrize("widths", MIXES.values(), ids=MIXES)
def test_the_file_holds_what_was_planned_and_widths_fall(widths: Sequence[int]) -> None:
    weight = random_weight(40, 160)
    packed = pack_linear(weight, widths, group_size=64, bias=torch.arange(40.0))
    planned = stored_shapes(MatrixShape(160, 40, 64), widths, bias=True)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.tensors.items()} == planned
    assert packed.tensors["q_groups"][::2].tolist() == sorted(widths, reverse=True)
    assert packed.tensors["bias"].tolist() == [*map(float, range(40)), *[0.0] * 24]
    stored_bits = sum(packed.tensors[name].nbytes for name in planned if name != "bias") * 8
    assert stored_bits == MatrixShape(160, 40, 64).stored_bits(widths)


def test_more_bits_lose_less() -> None:
    weight = random_weight(64, 96)
    errors = [
        float((decoded(pack_linear(weight, (width,) * 3, group_size=32).tensors, 64) - weight).norm())
        for width in WIDTHS
    ]
    assert all(more < less / 1.7 for less, more in pairwise(errors))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reported_error_is_the_decoded_one(width: int) -> None:
    weight = random_weight(33, 64)
    packed = pack_linear(weight, (width,) * 2, group_size=32)
    error = float((decoded(packed.tensors, 33) - weight).norm() / weight.norm())
    assert packed.errors[width].relative == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("width", WIDTHS)
def test_searched_scales_lose_less_than_those_that_hold_every_weight(width: int) -> None:
    groups = random_weight(64, 128, seed=3).t().reshape(4, 32, 64)
    holding = groups.abs().amax(dim=1, keepdim=True) / (2 ** (width - 1) - 0.5)
    unit = holding.amax(dim=2, keepdim=True) / 256
    scales = (holding / unit).sqrt().ceil().square() * unit
    steps = (groups / scales).round().clamp(-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    assert round_groups(groups, width).errors.sum() < (steps * scales - groups).square().sum()


def test_important_rows_get_the_first_groups() -> None:
    weight = random_weight(32, 96)
    weight[:, 70] = 9.0
    tensors = pack_linear(weight, (8, 2, 2), group_size=32).tensors
    assert tensors["q_invperm"][70] == 0
    assert (decoded(tensors, 32)[:, 70] - 9.0).abs().max() < 0.05


def test_importance_decides_between_rows_of_equal_size() -> None:
    importance = torch.ones(64)
    importance[5] = 100
    weight = torch.ones(32, 64)
    assert row_order(weight, importance)[0] == 5
    assert row_order(weight)[0] == 0


def test_padded_columns_hold_nothing() -> None:
    tensors = pack_linear(random_weight(33, 32), (5,), group_size=32).tensors
    assert tensors["q_weight"].shape[1] == 64
    assert (decoded(tensors, 64)[33:] == 0).all()
    _, values, _ = step_and_value(tensors)
    assert (values[:, 33:] == 16).all()


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-3, 30.0, 1000.0])
def test_weights_of_any_size_keep_their_precision_as_far_as_half_precision_has_it(scale: float) -> None:
    weight = random_weight(32, 64, scale=scale).clamp(-60000, 60000).half().float()
    error = (decoded(pack_linear(weight, (8, 8), group_size=32).tensors, 32) - weight).abs().max()
    assert error <= max(float(weight.abs().max()) * 0.05, 2.0**-24)


def test_a_matrix_of_zeros_stays_zeros() -> None:
    weight = torch.zeros(32, 64)
    tensors = pack_linear(weight, (4, 2), group_size=32).tensors
    assert (decoded(tensors, 32) == 0).all()
    assert measure_linear(weight, 32).errors == ((0.0,) * 6,) * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_float_is_packed_as_its_float32_is(dtype: torch.dtype) -> None:
    weight = random_weight(32, 64).to(dtype)
    ours = pack_linear(weight, (4, 3), group_size=32).tensors
    theirs = pack_linear(weight.float(), (4, 3), group_size=32).tensors
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_measure_of_a_group_is_its_share_of_the_error_times_the_weights() -> None:
    weight = random_weight(48, 96)
    measured = measure_linear(weight, 64)
    assert measured.shape == MatrixShape(96, 48, 64)
    for index, width in enumerate(WIDTHS):
        packed = pack_linear(weight, (width, width), group_size=64)
        lost = packed.errors[width].squared_error / packed.errors[width].squared_weight
        assert sum(group[index] for group in measured.errors) == pytest.approx(lost * weight.numel(), rel=1e-3)


def test_a_wide_matrix_is_judged_by_a_fair_sample() -> None:
    weight = random_weight(1024, 64)
    sampled = sum(group[WIDTHS.index(4)] for group in measure_linear(weight, 32).errors)
    whole = pack_linear(weight, (4, 4), group_size=32).errors[4].relative ** 2 * weight.numel()
    assert sampled == pytest.approx(whole, rel=0.25)
