"""Weights kept as float16 where the CPU multiplies no bfloat16 and has none of our kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.common import packed_weights
from engine.backends.common.native_build import SWITCH
from engine.backends.torch.model import linear
from engine.backends.torch.model import linear as half_linear
from engine.backends.torch.model.linear import (
    Fp16Linear,
    LinearFactory,
    PackedLinear,
    PlainLinear,
    add_product,
    fits_float16,
    linear_kind,
)
from engine.backends.torch.weights import model_loader
from engine.config import DtypeName, ModelSpec
from engine.placement import model_memory as torch_costs
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import ModelCosts, Workload, costs_of
from engine.worker_process import process
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import make_tiny_model

CPU = torch.device("cpu")
SHAPES = [(640, 512), (513, 517), (48, 5500)]
"""More elements than are worth packing; whole blocks of FBGEMM's, and not."""


def weight_of(rows: int, columns: int) -> torch.Tensor:
    """As a checkpoint in bfloat16 has it, made into float32."""
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
    return made.bfloat16().float()


def costs_on_a_cpu(folder: Path, dtype: DtypeName) -> ModelCosts:
    spec = ModelSpec(path=folder, name="m", dtype=dtype)
    return costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=False)


@pytest.fixture
def factory() -> LinearFactory:
    return LinearFactory(CPU, torch.float32, keep_fp16=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_over_halves_are_those_over_float32(shape: tuple[int, int], rows: int, with_bias: bool) -> None:
    weight = weight_of(*shape)
    bias = torch.linspace(-1, 1, shape[0]) if with_bias else None
    dice = torch.Generator().manual_seed(rows)
    x, residual = torch.randn(rows, shape[1], generator=dice), torch.randn(rows, shape[0], generator=dice)
    half, plain = Fp16Linear(weight, bias), PlainLinear(weight, bias)
    torch.testing.assert_close(half(x), plain(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(add_product(residual, half, x), residual + plain(x), atol=1e-5, rtol=1e-5)


def test_weights_are_kept_as_halves_where_float16_has_their_numbers(factory: LinearFactory) -> None:
    weight = weight_of(640, 512)
    assert linear_kind(factory.make(weight)) == "fbgemm float16"
    assert linear_kind(factory.make(weight, torch.zeros(640))) == "fbgemm float16"
    assert linear_kind(factory.make(weight, pack=False)) == "plain"
    assert linear_kind(factory.make(weight_of(8, 16))) == "plain"
    assert isinstance(LinearFactory(CPU, torch.float32).make(weight), PackedLinear)


@pytest.mark.parametrize("worst", [70_000.0, -70_000.0, float("inf"), float("nan")])
def test_a_weight_out_of_float16s_range_stays_float32(factory: LinearFactory, worst: float) -> None:
    weight = weight_of(640, 512)
    weight[17, 5] = worst
    assert not isinstance(factory.make(weight), Fp16Linear)


def test_a_weight_too_small_for_float16_stays_float32(factory: LinearFactory) -> None:
    assert not isinstance(factory.make(weight_of(640, 512) * 2.0**-20), Fp16Linear)
    assert fits_float16(torch.zeros(4, 4))


def test_a_torch_whose_halves_multiply_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Fp16Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 1.01

    monkeypatch.setattr(linear, "Fp16Linear", Wrong)
    factory = LinearFactory(CPU, torch.float32, keep_fp16=True)
    weight = weight_of(640, 512)
    assert isinstance(factory.make(weight), PackedLinear)
    assert isinstance(factory.make(weight_of(512, 640)), PackedLinear)


def test_a_torch_without_halves_packs_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fp16_linear_available", lambda: False)
    assert isinstance(LinearFactory(CPU, torch.float32, keep_fp16=True).make(weight_of(640, 512)), PackedLinear)


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_of_16_bits_keeps_them_where_nothing_multiplies_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tie: bool
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(model_loader, "native_bfloat16", lambda: False)
    for module in (linear, packed_weights, torch_costs):
        monkeypatch.setattr(module, "PACK_FLOAT32_MIN_ELEMENTS", 0)
    folder = make_tiny_model(tmp_path, dtype="bfloat16", tie=tie)
    halves, exact = load_runner(folder, dtype="auto"), load_runner(folder, dtype="float32")
    assert (halves.dtype_name, halves.linear) == ("float32", "fbgemm float16")
    assert (exact.dtype_name, exact.linear) == ("float32", "onednn")
    assert 0 < halves.weights_bytes < exact.weights_bytes
    assert halves.shared_bytes == 0
    for runner, dtype in ((halves, "auto"), (exact, "float32")):
        assert costs_on_a_cpu(folder, dtype).weights_bytes == runner.weights_bytes
    assert not costs_on_a_cpu(folder, "auto").shares_weights
    prompt = [(13 * position) % 300 + 3 for position in range(40)]
    found, expected = (driver.feed((driver.add(prompt), None)) for driver in map(Driver, (halves, exact)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_float32_keeps_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(model_loader, "native_bfloat16", lambda: False)
    for module in (linear, packed_weights, torch_costs):
        monkeypatch.setattr(module, "PACK_FLOAT32_MIN_ELEMENTS", 0)
    runner = load_runner(make_tiny_model(tmp_path, dtype="float32"), dtype="auto")
    assert runner.linear == "onednn"


def test_what_float16_keeps_of_bfloat16_is_all_of_it_from_a_hundred_thousandth_on() -> None:
    numbers = torch.tensor([2.0**-17, -(2.0**-14) * 1.9921875, 1.0078125, 65280.0])
    assert torch.equal(numbers.bfloat16().float(), numbers.half().float())
    assert half_linear.fp16_linear_available()


@pytest.mark.parametrize(("kernels", "turns"), [(True, "3000"), (False, "10000")])
def test_threads_spin_longer_where_torchs_own_operations_let_them_wait(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, turns: str
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(process, "kernels_available", lambda: kernels)
    assert process.worker_environment()["GOMP_SPINCOUNT"] == turns
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert process.worker_environment()["GOMP_SPINCOUNT"] == "7"
