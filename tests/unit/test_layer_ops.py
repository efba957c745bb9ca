"""The Triton kernels of a layer compute what its plain operations do, rounded where those round. On a machine without a
GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.common.families.base import NormKind
from engine.backends.common.families.experts import Experts
from engine.backends.common.model_config import Activation
from engine.backends.common.rope_config import RopeConfig
from engine.backends.torch.cuda import layer_ops
from engine.backends.torch.cuda.layer_ops import (
    GroupedExperts,
    HeadNormWeight,
    LayerOps,
    layer_ops_problem,
    max_blocks,
    tile_for,
)
from engine.backends.torch.model.linear import PlainLinear
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp
from engine.backends.torch.model.norms import HeadNorm, RmsNorm, WideRmsNorm, norm_without_weight
from engine.backends.torch.model.rope import RotaryEmbedding, rotate_
from tests.fakes.recording import NoReads

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16)
UNITS = dict.fromkeys(DTYPES, 1) if DEVICE.type == "cuda" else {torch.float16: 0, torch.bfloat16: 2}
"""Units that one rounding may differ by: Triton's interpreter cuts float32 off to bfloat16."""

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
FUZZ = settings(max_examples=15, phases=(Phase.explicit, Phase.generate), deadline=None)


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor, units: float) -> None:
    """They differ by no more than so many units in the last place of the largest number of their row."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if not found.numel():
        return
    size = expected.float().abs().amax(dim=-1, keepdim=True)
    unit = torch.finfo(expected.dtype).eps * size + torch.finfo(expected.dtype).tiny
    assert ((found.float() - expected.float()).abs() <= units * unit).all()


def mixture(
    experts: int, per_token: int, hidden: int, inner: int, dtype: torch.dtype, activation: Activation, seed: int
) -> MixtureMlp:
    """A mixture without `grouped`, whose weights keep numbers at about the same size."""
    mlps = tuple(
        GatedMlp(
            PlainLinear(random(2 * inner, hidden, dtype=dtype, seed=seed + 3 * at) / hidden**0.5, None),
            PlainLinear(random(hidden, inner, dtype=dtype, seed=seed + 3 * at + 1) / inner**0.5, None),
            activation,
        )
        for at in range(experts)
    )
    router = PlainLinear(random(experts, hidden, dtype=dtype, seed=seed + 2), None)
    return MixtureMlp(router, mlps, per_token, normalised=True)


def routed(plain: MixtureMlp, x: Tensor) -> tuple[Tensor, Tensor]:
    chosen, weights = plain._route(plain.router(x))
    return chosen.int(), weights


def grouped(plain: MixtureMlp) -> GroupedExperts:
    weights = [(each.gate_up.weight, each.down.weight) for each in plain.experts]  # type: ignore[attr-defined]
    gate_ups, downs = zip(*weights, strict=True)
    return GroupedExperts(LayerOps(DEVICE), gate_ups, downs, plain.experts[0].activation)


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


@FUZZ
@given(
    rows=st.integers(1, 70),
    experts=st.integers(1, 9),
    per_token=st.integers(1, 4),
    hidden=st.integers(1, 20).map(lambda number: 8 * number),
    inner=st.integers(2, 150),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**16),
)
def test_experts_in_few_launches_are_those_one_by_one(
    rows: int,
    experts: int,
    per_token: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    activation: Activation,
    seed: int,
) -> None:
    plain = mixture(experts, min(per_token, experts), hidden, inner, dtype, activation, seed)
    x = random(rows, hidden, dtype=dtype, seed=seed)
    chosen, weights = routed(plain, x)
    # Sums of products in another order round a few gates and outputs to the next number.
    assert_near(grouped(plain)(x, chosen, weights), plain(x, 0), units=8)


@FUZZ
@given(
    rows=st.integers(1, 9),
    experts=st.integers(1, 70),
    per_token=st.integers(1, 8),
    normalised=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_rows_go_to_the_experts_of_torch_with_its_weights(
    rows: int, experts: int, per_token: int, normalised: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(experts, generator=generator) for _ in range(rows)]).to(DEVICE, dtype) / 4
    plain = mixture(experts, min(per_token, experts), 8, 2, dtype, "silu", 1)
    plain = replace(plain, normalised=normalised)
    expected, shares = plain._route(logits)
    chosen, weights = grouped(plain).route(logits, plain.per_token, normalised=normalised)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-7)


def test_a_row_goes_to_the_first_of_equal_experts_and_one_that_is_not_finite_to_any() -> None:
    plain = mixture(6, 2, 8, 2, torch.float16, "silu", 1)
    logits = torch.zeros(3, 6, dtype=torch.float16, device=DEVICE)
    logits[1, 3], logits[2, 4] = torch.nan, torch.inf
    chosen, weights = grouped(plain).route(logits, 2, normalised=True)
    assert chosen[0].tolist() == [0, 1] and weights[0].tolist() == [0.5, 0.5]
    assert ((chosen >= 0) & (chosen < 6)).all() and (chosen[:, 0] < chosen[:, 1]).all()
    assert weights[1:].isnan().all()


@pytest.mark.parametrize("rows", [5, 100, 200])
def test_every_tile_takes_rows_that_all_go_to_one_expert(rows: int) -> None:
    plain = mixture(8, 2, 64, 48, torch.float16, "silu", 7)
    x = random(rows, 64, dtype=torch.float16)
    chosen = torch.tensor([[0, 7]], dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    weights = torch.tensor([[0.75, 0.25]], device=DEVICE).expand(rows, -1).contiguous()
    expected = 0.75 * plain.experts[0](x, 0).float() + 0.25 * plain.experts[7](x, 0).float()
    assert_near(grouped(plain)(x, chosen, weights), expected.half(), units=8)


def test_tiles_grow_with_the_rows_of_an_expert_and_blocks_suffice_however_these_fall() -> None:
    assert [tile_for(assignments, 8).block_m for assignments in (2, 128, 129, 256, 257, 9999)] == [
        16,
        16,
        32,
        32,
        64,
        64,
    ]
    for counts in ((1,) * 8, (100,) + (0,) * 7, (17, 16, 15, 0, 1, 33, 2, 0)):
        needed = sum(-(-count // 16) for count in counts)
        assert needed <= max_blocks(sum(counts), 8, 16)
    assert max_blocks(8, 8, 16) == 8
    assert max_blocks(24, 8, 16) == 9  # seven rows go to seven experts, 17 to the eighth


def test_a_row_that_is_not_finite_makes_itself_so_alone() -> None:
    plain = mixture(4, 2, 32, 24, torch.float16, "silu", 3)
    x = random(3, 32, dtype=torch.float16)
    chosen, weights = routed(plain, x)
    clean = grouped(plain)(x, chosen, weights)
    x[1, 5] = torch.inf
    found = grouped(plain)(x, chosen, weights)
    assert not found[1].isfinite().any()
    assert torch.equal(found[0::2], clean[0::2])


def test_the_host_reads_nothing_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mixture(6, 2, 32, 24, torch.float16, "silu", 3)
    x = random(9, 32, dtype=torch.float16)
    expected = plain(x, 0)

    def read(tensor: Tensor) -> None:
        raise AssertionError("tolist waits for the device")

    monkeypatch.setattr(Tensor, "tolist", read)
    with pytest.raises(AssertionError, match="waits for the device"):
        plain(x, 0)
    whole = MixtureMlp(plain.router, plain.experts, 2, normalised=True, grouped=grouped(plain))
    with NoReads():
        found = whole(x, 0)
    assert_near(found, expected, units=8)


@pytest.mark.parametrize(
    ("activation", "dtype"), [("silu", torch.bfloat16), ("gelu", torch.float16), ("gelu_tanh", torch.float16)], ids=str
)
def test_the_kernels_are_tried_before_they_are_used(activation: Activation, dtype: torch.dtype) -> None:
    experts = Experts(layers=(True,), count=4, per_token=2, inner=9) if activation == "silu" else None
    assert layer_ops_problem([DEVICE], dtype, activation, experts) == ""


def test_wrong_products_of_experts_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ops, "max_blocks", lambda *sizes: 1)
    experts = Experts(layers=(True,), count=4, per_token=2, inner=9)
    assert "products of experts differ" in layer_ops_problem([DEVICE], torch.float16, "silu", experts)


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
    monkeypatch.setattr(layer_ops, "triton_problem", lambda: "triton is not installed")
    assert layer_ops_problem([DEVICE], torch.float16, "silu") == "triton is not installed"
    assert layer_ops_problem([DEVICE], torch.float32, "silu") == "they do not compute in float32"
