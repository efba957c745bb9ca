"""Choosing bit widths: the target is met, never exceeded, and no better use of the bits is left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.exl2_writer.bit_allocation import (
    GROUP_SIZES,
    WIDTHS,
    MatrixErrors,
    MatrixShape,
    average_bits,
    least_bits,
    plan_widths,
)

Matrices = dict[str, MatrixErrors]


def matrix(rows: int, columns: int, *sizes: float, group_size: int = 32) -> MatrixErrors:
    """Errors that fall fourfold per bit, as rounding's do; `sizes` are those of the groups, most important first."""
    shape = MatrixShape(rows, columns, group_size)
    return MatrixErrors(shape, tuple(tuple(size * 4.0**-width for width in WIDTHS) for size in sizes))


@st.composite
def matrices(draw: st.DrawFn) -> Matrices:
    """One to six matrices of any shape, whose errors fall with the width in any way."""
    found: Matrices = {}
    for number in range(draw(st.integers(1, 6))):
        shape = MatrixShape(
            32 * draw(st.integers(1, 12)), draw(st.integers(1, 300)), draw(st.sampled_from(GROUP_SIZES))
        )
        errors = [
            tuple(sorted(draw(st.lists(st.floats(0, 100), min_size=6, max_size=6)), reverse=True))
            for _ in shape.group_rows()
        ]
        found[f"m{number}"] = MatrixErrors(shape, tuple(errors))
    return found


def shapes(given: Matrices) -> dict[str, MatrixShape]:
    return {name: found.shape for name, found in given.items()}


def total_error(given: Matrices, plan: dict[str, tuple[int, ...]]) -> float:
    return sum(
        errors[WIDTHS.index(width)]
        for name, found in given.items()
        for errors, width in zip(found.errors, plan[name], strict=True)
    )


@given(matrices(), st.floats(2, 8))
def test_the_target_is_never_exceeded(given: Matrices, bits: float) -> None:
    if bits < least_bits(shapes(given).values()):
        with pytest.raises(ValueError, match="cannot hold"):
            plan_widths(given, bits)
        return
    plan = plan_widths(given, bits)
    assert average_bits(shapes(given), plan) <= bits
    assert all(len(plan[name]) == len(found.errors) for name, found in given.items())
    assert {width for widths in plan.values() for width in widths} <= set(WIDTHS)


@given(matrices(), st.floats(2, 8), st.floats(0, 2))
def test_more_bits_never_add_more_error_than_one_group_can_hold(given: Matrices, bits: float, more: float) -> None:
    """Greedy filling may swap one wide step for small ones, so the error may rise, by less than one group's."""
    if bits < least_bits(shapes(given).values()):
        return
    worst_group = max(errors[0] for found in given.values() for errors in found.errors)
    few, many = plan_widths(given, bits), plan_widths(given, bits + more)
    assert total_error(given, many) <= total_error(given, few) + worst_group


@given(st.lists(st.floats(0.01, 100), min_size=64, max_size=64), st.floats(2.5, 8))
def test_a_model_of_many_groups_meets_its_target_within_a_fiftieth(sizes: list[float], bits: float) -> None:
    given = {f"m{number}": matrix(512, 128, *sizes[16 * number : 16 * number + 16]) for number in range(4)}
    assert bits - 0.02 - 2 / 64 <= average_bits(shapes(given), plan_widths(given, bits)) <= bits


@pytest.mark.parametrize("bits", [3.0, 3.5, 4.65, 5.25, 6.0, 7.9])
def test_a_real_models_shapes_meet_any_target_within_a_fiftieth(bits: float) -> None:
    given = {
        f"{layer}.{name}": matrix(rows, columns, *(2.0 ** -(group % 7) for group in range(rows // 32)))
        for layer in range(6)
        for name, rows, columns in (("q", 256, 256), ("k", 256, 128), ("gate", 256, 768), ("down", 768, 256))
    }
    assert bits - 0.02 <= average_bits(shapes(given), plan_widths(given, bits)) <= bits


def test_bits_go_where_they_take_most_error_away() -> None:
    given = {"loud": matrix(64, 64, 100.0, 1.0), "quiet": matrix(64, 64, 1.0, 0.01)}
    plan = plan_widths(given, 5.0)
    assert plan["loud"][0] > plan["loud"][1]
    assert plan["quiet"][0] > plan["quiet"][1]
    assert plan["loud"][0] > plan["quiet"][0]


def test_no_single_trade_between_two_equal_groups_lowers_the_error() -> None:
    given = {"m": matrix(256, 64, *(3.0**-group for group in range(8)))}
    (plan,) = plan_widths(given, 4.5).values()
    errors = given["m"].errors
    for up in range(8):
        for down in range(8):
            wider, narrower = WIDTHS.index(plan[up]) + 1, WIDTHS.index(plan[down]) - 1
            if up == down or wider == len(WIDTHS) or narrower < 0:
                continue
            if WIDTHS[wider] - plan[up] > plan[down] - WIDTHS[narrower]:
                continue
            before = errors[up][wider - 1] + errors[down][narrower + 1]
            assert errors[up][wider] + errors[down][narrower] >= before * (1 - 1e-12)


def test_a_width_that_buys_nothing_is_not_paid_for() -> None:
    given = {"zero": MatrixErrors(MatrixShape(32, 32, 32), ((0.0,) * 6,)), "m": matrix(32, 32, 1.0)}
    assert plan_widths(given, 7.0)["zero"] == (2,)


def test_a_width_off_the_convex_hull_is_skipped() -> None:
    """3 bits are hardly better than 2, and 4 much: the plan goes from 2 to 4."""
    given = {"m": MatrixErrors(MatrixShape(64, 64, 32), ((10.0, 9.9, 1.0, 0.9, 0.8, 0.7),) * 2)}
    overhead = given["m"].shape.overhead_bits() / given["m"].shape.elements
    assert plan_widths(given, 3.0 + overhead) == {"m": (4, 2)}


def test_stored_bits_count_padding_scales_groups_and_the_permutation() -> None:
    shape = MatrixShape(rows=160, columns=40, group_size=128)
    assert shape.group_rows() == (128, 32)
    values = (128 * 4 + 32 * 3) * 64
    assert shape.stored_bits((4, 3)) == values + 2 * (64 * 4 + 48) + 160 * 32
    assert math.isclose(average_bits({"m": shape}, {"m": (4, 3)}), shape.stored_bits((4, 3)) / 6400)
