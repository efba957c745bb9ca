"""The Triton kernels of a layer compute what its plain operations do, rounded where those round. On a machine without a
GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backends import triton_launch
from engine.backends.common.families.base import NormKind
from engine.backends.common.model_config import Activation
from engine.backends.common.rope_config import RopeConfig
from engine.backends.torch.cuda.layer_ops import HeadNormWeight, LayerOps, layer_ops_problem
from engine.backends.torch.model.linear import PlainLinear
from engine.backends.torch.model.mlp import GatedMlp
from engine.backends.torch.model.norms import HeadNorm, RmsNorm, WideRmsNorm, norm_without_weight
from engine.backends.torch.model.rope import RotaryEmbedding, rotate_
from tests.fakes.triton_numbers import ACTIVATIONS, DEVICE, DTYPES, FUZZ, assert_near, random

pytest.importorskip("triton")

UNITS = dict.fromkeys(DTYPES, 1) if DEVICE.type == "cuda" else {torch.float16: 0, torch.bfloat16: 2}
"""Units that one rounding may differ by: Triton's interpreter cuts float32 off to bfloat16."""


@FUZZ
@given(
    rows=st.integers(0, 5),
    inner=st.integers(2, 1100),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    scale=st.sampled_from((0.1, 1.0, 30.0)),
    seed=st.integers(0, 2**16),
)
def test_a_gate_is_multiplied_as_torch_does(
    rows: int, inner: int, dtype: torch.dtype, activation: Activation, scale: float, seed: int
) -> None:
    both = random(rows, 2 * inner, dtype=dtype, seed=seed) * scale
    plain = PlainLinear(both, None)
    expected = GatedMlp(plain, plain, activation).activate_gate(both)
    # The activation may round to the next number, and the interpreter cuts float32 off to bfloat16.
    found = LayerOps(DEVICE).activate_gate(both, activation)
    allowed = 3 * torch.finfo(dtype).eps * expected.float().abs() + 1e-3 * both[:, inner:].float().abs()
    assert ((found.float() - expected.float()).abs() <= allowed).all()


@FUZZ
@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_sum_and_the_norm_after_it_are_those_of_two_steps(
    rows: int, width: int, dtype: torch.dtype, wide: bool, seed: int
) -> None:
    hidden, added = random(rows, width, dtype=dtype, seed=seed), random(rows, width, dtype=dtype, seed=seed + 1)
    weight = random(width, dtype=torch.float32 if wide else dtype, seed=seed + 2)
    total = hidden + added
    expected = (WideRmsNorm if wide else RmsNorm)(weight, 1e-5)(total)
    found = LayerOps(DEVICE).add_norm(hidden, added, weight, 1e-5)
    assert_near(hidden, total, units=UNITS[dtype])
    assert_near(found, expected, units=2 * UNITS[dtype] + 1)


@FUZZ
@given(
    rows=st.integers(0, 4),
    heads=st.sampled_from((1, 4, 12)),
    kv_heads=st.sampled_from((1, 2, 3)),
    head_dim=st.sampled_from((8, 24, 64)),
    rotated=st.sampled_from((0.25, 0.75, 1.0, None)),
    norm=st.sampled_from((None, "rms", "rms_plus_one")),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_queries_are_rotated_and_keys_and_values_written_as_in_separate_steps(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotated: float | None,
    norm: NormKind | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    qkv = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=seed)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:rows].to(DEVICE)
    pages = random(10, 4, 2 * kv_heads, head_dim, dtype=dtype, seed=seed + 1)
    weight = random(heads + kv_heads, head_dim, dtype=dtype if norm == "rms" else torch.float32, seed=seed + 2)
    plain, plain_pages = qkv.clone(), pages.clone()
    turned = plain[:, : heads + kv_heads]
    if norm is not None:
        turned.copy_(HeadNorm(norm_without_weight(norm, head_dim, 1e-6), weight, 1e-6)(turned))
    angles = None
    if rotated is not None:
        config = RopeConfig(rotary_fraction=rotated)
        angles = RotaryEmbedding(config, head_dim, DEVICE).angles(37 * torch.arange(rows, device=DEVICE), dtype)
        rotate_(turned, *angles)
    plain_pages.flatten(0, 1).index_copy_(0, slots, plain[:, heads:])
    of_heads = HeadNormWeight(norm, weight, 1e-6) if norm is not None else None
    LayerOps(DEVICE).rotate_and_write(qkv, heads, of_heads, angles, pages, slots)
    assert_near(qkv[:, :heads], plain[:, :heads], units=4 * UNITS[dtype])
    assert_near(pages, plain_pages, units=4 * UNITS[dtype])
    untouched = torch.ones(40, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert torch.equal(pages.flatten(0, 1)[untouched.to(DEVICE)], plain_pages.flatten(0, 1)[untouched.to(DEVICE)])


def test_slots_may_lie_further_out_than_32_bits_count_elements() -> None:
    rows, kv_heads, size, page_tokens = 3, 2, 64, 256
    qkv = random(rows, 4 + 2 * kv_heads, size, dtype=torch.float16)
    first = 2**31 // (page_tokens * 2 * kv_heads * size)
    pages = torch.empty(  # takes memory where it is written
        first + 1, page_tokens, 2 * kv_heads, size, dtype=torch.float16, device=DEVICE
    )
    pages[first] = 0
    keys_values, slots = qkv[:, 4:].clone(), first * page_tokens + torch.tensor([255, 0, 7], device=DEVICE)
    LayerOps(DEVICE).rotate_and_write(qkv, 4, None, None, pages, slots)
    assert torch.equal(pages.flatten(0, 1)[slots], keys_values)
    assert torch.count_nonzero(pages[first].flatten(1).any(dim=1)) == rows


@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", torch.bfloat16), ("gelu", torch.float16), ("gelu_tanh", torch.float16)], ids=str
)
def test_the_kernels_are_tried_before_they_are_used(activation: Activation, dtype: torch.dtype) -> None:
    assert layer_ops_problem([DEVICE], dtype, activation) == ""


@pytest.mark.parametrize("head_norm", ["rms", "rms_plus_one"])
def test_a_norm_per_head_and_a_rotation_in_part_are_tried_for_a_model_that_has_them(
    head_norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert layer_ops_problem([DEVICE], torch.bfloat16, "silu", head_norm, 0.4) == ""
    right = LayerOps.rotate_and_write

    def without_norm(ops: LayerOps, qkv: Tensor, heads: int, norm: HeadNormWeight | None, *more: Any) -> None:
        right(ops, qkv, heads, None, *more)

    monkeypatch.setattr(LayerOps, "rotate_and_write", without_norm)
    assert "rotated heads differ" in layer_ops_problem([DEVICE], torch.bfloat16, "silu", head_norm, 0.4)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("activate_gate", "gates differ"),
        ("add_norm", "norms differ"),
        ("rotate_and_write", "rotated heads differ"),
    ],
)
def test_wrong_numbers_and_errors_switch_them_off_with_the_reason(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., Tensor | None] = getattr(LayerOps, name)

    def wrong(ops: LayerOps, first: Tensor, *more: object) -> Tensor | None:
        return right(ops, first * 1.1 if name == "activate_gate" else first.mul_(1.1), *more)

    monkeypatch.setattr(LayerOps, name, wrong)
    assert problem in layer_ops_problem([DEVICE], torch.float16, "silu")

    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(LayerOps, name, broken)
    assert layer_ops_problem([DEVICE], torch.float16, "silu").endswith(f"on {DEVICE}: RuntimeError: no compiler")
    monkeypatch.setattr(triton_launch, "triton_problem", lambda: "triton is not installed")
    assert layer_ops_problem([DEVICE], torch.float16, "silu") == "triton is not installed"
    assert layer_ops_problem([DEVICE], torch.float32, "silu") == "they do not compute in float32"
