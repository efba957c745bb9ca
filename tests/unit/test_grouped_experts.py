"""Experts in few launches of Triton kernels compute what they do one by one, from plain weights and from codes. On a
machine without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.checkpoints.gguf import dequantise
from engine.backends.common.families.experts import Experts
from engine.backends.common.gguf_codes import Codes
from engine.backends.common.model_config import Activation
from engine.backends.common.packed_codes import ALL
from engine.backends.torch.cuda import grouped_experts
from engine.backends.torch.cuda.coded_linear import CodedKernels, CodedLinear, CodedMatrix
from engine.backends.torch.cuda.gguf_matrix import BLOCK_BYTES, gguf_matrix
from engine.backends.torch.cuda.grouped_experts import (
    CodedExperts,
    GroupedExperts,
    PlainExperts,
    block_size,
    experts_problem,
    groups_codes,
    max_blocks,
)
from engine.backends.torch.cuda.layer_ops import LayerOps, gated
from engine.backends.torch.cuda.packed_matrix import random_matrix
from engine.backends.torch.model.linear import PlainLinear
from engine.backends.torch.model.mlp import GatedMlp, MixtureMlp, _group
from tests.fakes.recording import NoReads
from tests.fakes.triton_numbers import ACTIVATIONS, DEVICE, DTYPES, FUZZ, assert_near, random

pytest.importorskip("triton")


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
    ops = LayerOps(DEVICE)
    return GroupedExperts(ops, PlainExperts(ops, gate_ups, downs, plain.experts[0].activation), len(downs))


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
def test_every_block_size_takes_rows_that_all_go_to_one_expert(rows: int) -> None:
    plain = mixture(8, 2, 64, 48, torch.float16, "silu", 7)
    x = random(rows, 64, dtype=torch.float16)
    chosen = torch.tensor([[0, 7]], dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    weights = torch.tensor([[0.75, 0.25]], device=DEVICE).expand(rows, -1).contiguous()
    expected = 0.75 * plain.experts[0](x, 0).float() + 0.25 * plain.experts[7](x, 0).float()
    assert_near(grouped(plain)(x, chosen, weights), expected.half(), units=8)


def test_blocks_grow_with_the_rows_of_an_expert_and_blocks_suffice_however_these_fall() -> None:
    sizes = (16, 32, 64)
    assert [block_size(assignments, 8, sizes) for assignments in (2, 128, 129, 256, 257, 9999)] == [
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures_are_tried_before_they_are_used(dtype: torch.dtype) -> None:
    experts = Experts(layers=(True,), count=4, per_token=2, inner=9)
    assert experts_problem([DEVICE], dtype, "silu", experts) == ""


def test_wrong_products_of_experts_switch_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "max_blocks", lambda *sizes: 1)
    experts = Experts(layers=(True,), count=4, per_token=2, inner=9)
    assert "products of experts differ" in experts_problem([DEVICE], torch.float16, "silu", experts)


# From codes.

FOLDER_CODES = {
    "GPTQ 32": Codes("GPTQ", 0, 0, 1),
    "GPTQ 128": Codes("GPTQ", 0, 0, 4),
    "AWQ 64": Codes("AWQ", 0, 0, 2),
    "AWQ one group": Codes("AWQ", 0, 0, ALL),
    "FP8 blocks": Codes("F8_E4M3", 0, 0, 4, 48),
    "FP8 rows": Codes("F8_E4M3", 0, 0, ALL, 1),
    "E5M2 one scale": Codes("F8_E5M2", 0, 0, ALL, ALL),
}
GGUF_CODES = ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def coded_matrix(name: str, rows: int, inputs: int, seed: int, *, ordered: bool = False) -> tuple[CodedMatrix, Tensor]:
    """A matrix in codes, and its weight [rows, inputs] unpacked, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    if name in GGUF_CODES:
        values, num_bytes = BLOCK_BYTES[name]
        raw = torch.randint(28, (rows, inputs // values * num_bytes), dtype=torch.uint8, generator=generator)
        return gguf_matrix(raw, Codes(name, rows, inputs), DEVICE), dequantise(raw, name)
    matrix, weight = random_matrix(FOLDER_CODES[name]._replace(rows=rows, inputs=inputs), DEVICE, seed)
    if matrix.layout.floats:  # up to 448 or 57344 times as large
        less = 2.0**13 if matrix.layout.floats == "e5m2" else 64.0
        matrix, weight = replace(matrix, scale=matrix.scale / less), weight / less
    if ordered:
        order = torch.randperm(inputs, generator=generator)
        weight = torch.empty_like(weight).index_copy_(1, order, weight)
        matrix = replace(matrix, order=order.to(DEVICE, torch.int32))
    return matrix, weight


class CodedMixture:
    """Experts in codes, and their weights unpacked. formats: of gates, of ups and of downs.  ordered: experts with
    inputs in the order of groups."""

    def __init__(
        self,
        formats: tuple[str, str, str],
        experts: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        *,
        ordered: Sequence[int] = (),
        seed: int = 1,
    ) -> None:
        kernels, self.ops = CodedKernels(DEVICE), LayerOps(DEVICE)
        self.gate_ups: list[CodedLinear] = []
        self.downs: list[CodedLinear] = []
        self.weights: list[tuple[Tensor, Tensor]] = []
        for expert in range(experts):
            in_order = expert in ordered
            gate, up = (
                coded_matrix(name, inner, hidden, seed + 9 * expert + at, ordered=in_order)
                for at, name in enumerate(formats[:2])
            )
            down = coded_matrix(formats[2], hidden, inner, seed + 9 * expert + 2, ordered=in_order)
            self.gate_ups.append(CodedLinear(kernels, [gate[0], up[0]], dtype))
            self.downs.append(CodedLinear(kernels, [down[0]], dtype))
            self.weights.append((torch.cat((gate[1], up[1])), down[1]))

    @property
    def mlps(self) -> tuple[GatedMlp, ...]:
        return tuple(GatedMlp(*each) for each in zip(self.gate_ups, self.downs, strict=True))

    def grouped(self) -> GroupedExperts:
        return GroupedExperts(self.ops, CodedExperts(self.ops, self.gate_ups, self.downs, "silu"), len(self.downs))

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """By the unpacked weights, rounded where a layer's results are."""
        rounded = [[self._product(x[row : row + 1], expert) for expert in experts] for row, experts in _listed(chosen)]
        outputs = torch.stack([torch.cat(each) for each in rounded]).float()
        return (outputs * weights.cpu()[:, :, None]).sum(1).to(x.dtype)

    def _product(self, x: Tensor, expert: int) -> Tensor:
        gate_up, down = self.weights[expert]
        both = (x.cpu().float() @ gate_up.T).to(x.dtype)
        return (gated(both.float(), "silu").to(x.dtype).float() @ down.T).to(x.dtype)


def _listed(chosen: Tensor) -> list[tuple[int, list[int]]]:
    return list(enumerate(chosen.tolist()))


def some_rows(
    rows: int, experts: int, per_token: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the experts of each, and their shares."""
    logits = random(rows, experts, dtype=torch.float32, seed=rows)
    weights, chosen = torch.softmax(logits, dim=-1).topk(per_token, dim=-1)
    chosen, order = chosen.sort(dim=-1)
    return random(rows, hidden, dtype=dtype, seed=rows + 1), chosen.int(), weights.gather(-1, order).contiguous()


@pytest.mark.long
@settings(max_examples=10, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(
    name=st.sampled_from((*FOLDER_CODES, *GGUF_CODES)),
    rows=st.integers(1, 20),
    experts=st.integers(1, 4),
    per_token=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    ordered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_experts_in_codes_are_those_of_the_unpacked_weights(
    name: str, rows: int, experts: int, per_token: int, dtype: torch.dtype, ordered: bool, seed: int
) -> None:
    per_token, size = min(per_token, experts), 256 if name.endswith("_K") else 96
    whole = CodedMixture((name,) * 3, experts, size, size, dtype, ordered=range(experts) if ordered else (), seed=seed)
    x, chosen, weights = some_rows(rows, experts, per_token, size, dtype)
    found = whole.grouped()(x, chosen, weights)
    assert_near(found.cpu(), whole.expected(x, chosen, weights), units=12)


@pytest.mark.long
@pytest.mark.parametrize("name", [*FOLDER_CODES, *GGUF_CODES])
def test_experts_of_each_format_are_computed_together(name: str) -> None:
    size = 256 if name.endswith("_K") else 160
    whole = CodedMixture((name,) * 3, 3, size, size, torch.float16)
    x, chosen, weights = some_rows(4, 3, 2, size, torch.float16)
    assert_near(whole.grouped()(x, chosen, weights).cpu(), whole.expected(x, chosen, weights), units=12)


def test_gates_and_ups_of_several_formats_are_computed_together_and_some_experts_may_be_in_order_of_groups() -> None:
    whole = CodedMixture(("GPTQ 32", "FP8 rows", "Q8_0"), 4, 64, 96, torch.float16, ordered=(1, 2))
    x, chosen, weights = some_rows(9, 4, 2, 64, torch.float16)
    assert_near(whole.grouped()(x, chosen, weights).cpu(), whole.expected(x, chosen, weights), units=12)


@pytest.mark.parametrize("rows", [5, 100, 200, 300])
def test_every_block_size_takes_rows_that_all_go_to_one_expert_in_codes(rows: int) -> None:
    whole = CodedMixture(("AWQ 64",) * 3, 8, 64, 64, torch.float16)
    x, chosen = random(rows, 64, dtype=torch.float16), torch.tensor([[0, 7]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.75, 0.25]], device=DEVICE).expand(rows, -1).contiguous()
    found = whole.grouped()(x, chosen.repeat(rows, 1), weights)
    assert_near(found.cpu(), whole.expected(x, chosen.repeat(rows, 1), weights), units=12)


def test_the_host_reads_nothing_of_experts_in_codes() -> None:
    whole = CodedMixture(("GPTQ 32",) * 3, 4, 64, 64, torch.float16, ordered=(0, 3))
    x, chosen, weights = some_rows(9, 4, 2, 64, torch.float16)
    grouped = whole.grouped()
    with NoReads():
        grouped(x, chosen, weights)


def test_experts_of_one_kind_are_grouped_and_others_are_computed_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CodedMixture(("AWQ 64",) * 3, 3, 64, 64, torch.float16)
    assert _group(whole.mlps, 2, whole.ops) is not None
    other = CodedMixture(("GPTQ 32",) * 3, 1, 64, 64, torch.float16)
    assert not groups_codes([*whole.downs, *other.downs])
    assert _group((*whole.mlps, *other.mlps), 2, whole.ops) is None
    plain = mixture(1, 1, 64, 64, torch.float16, "silu", 1)
    assert _group((*whole.mlps, *plain.experts), 2, whole.ops) is None
    assert not caplog.messages
    monkeypatch.setattr(grouped_experts, "max_blocks", lambda *sizes: 1)
    assert _group(whole.mlps, 2, whole.ops) is None
    assert caplog.messages == ["experts are computed from their codes one by one: their grouped products differ"]
