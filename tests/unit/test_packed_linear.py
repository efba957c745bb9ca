"""Packed linear layers are used only where they give what plain ones give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.torch.model import linear
from engine.backends.torch.model.linear import (
    PACK_FLOAT32_MIN_ELEMENTS,
    LinearFactory,
    PackedLinear,
    PlainLinear,
    add_product,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_a_layer_multiplies_like_the_plain_one_for_any_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1024, 512, generator=generator).to(dtype)
    biases = torch.randn(1024, generator=generator).to(dtype) if bias else None
    layer = LinearFactory(CPU, dtype).make(weight, biases)
    for rows in (0, 1, 7, 64):
        x = torch.randn(rows, 512, generator=generator).to(dtype)
        expected = torch.nn.functional.linear(x, weight, biases)
        tolerance = 1e-3 if dtype == torch.float32 else 0.5
        torch.testing.assert_close(layer(x), expected, atol=tolerance, rtol=2e-2)


def test_a_packed_product_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PackedLinear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 1.5

    monkeypatch.setattr(linear, "PackedLinear", Wrong)
    weight = torch.ones(512, PACK_FLOAT32_MIN_ELEMENTS // 512)
    assert type(LinearFactory(CPU, torch.float32).make(weight)) is PlainLinear


def test_a_packed_sum_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PackedLinear):
        def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
            return self(x)

    monkeypatch.setattr(linear, "PackedLinear", Wrong)
    weight = torch.ones(512, PACK_FLOAT32_MIN_ELEMENTS // 512)
    assert type(LinearFactory(CPU, torch.float32).make(weight)) is PlainLinear


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_added_to_what_was_there_leaves_that_as_it_is(pack: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(576, 512, generator=generator).to(dtype)
    layer = LinearFactory(CPU, dtype).make(weight, pack=pack)
    for rows in (1, 7):
        x = torch.randn(rows, 512, generator=generator).to(dtype)
        residual = torch.randn(rows, 576, generator=generator).to(dtype)
        before = residual.clone()
        tolerance = 1e-3 if dtype == torch.float32 else 0.5
        torch.testing.assert_close(add_product(residual, layer, x), residual + layer(x), atol=tolerance, rtol=2e-2)
        assert torch.equal(residual, before)


def test_packing_that_fails_falls_back_to_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(linear, "PackedLinear", fail)
    weight = torch.ones(512, PACK_FLOAT32_MIN_ELEMENTS // 512)
    assert type(LinearFactory(CPU, torch.float32).make(weight)) is PlainLinear


def test_small_float32_weights_and_other_devices_stay_plain() -> None:
    assert type(LinearFactory(CPU, torch.float32).make(torch.ones(8, 8))) is PlainLinear
    large = torch.ones(512, PACK_FLOAT32_MIN_ELEMENTS // 512)
    assert type(LinearFactory(torch.device("cuda", 0), torch.float32).make(large)) is PlainLinear
