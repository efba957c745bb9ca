"""The AWQ reader gives the weights of the format's rules bit for bit, and names what is malformed or not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.checkpoints.awq import AwqLinear
from engine.backends.common.quant_config import Quantisation, read_quantisation
from engine.errors import ModelLoadFailed, UnsupportedModel
from tests.fakes.awq_tensors import dequantise_by_rules, pack_interleaved, random_awq

KEY = "model.layers.0.mlp.up_proj"


def assert_bit_for_bit(tensors: dict[str, Tensor]) -> None:
    found, expected = AwqLinear(KEY, **tensors).dequantise(), dequantise_by_rules(tensors)
    assert found.dtype == torch.float16
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_the_columns_of_a_word_are_interleaved() -> None:
    """0x75316420: from the lowest nibble up, columns 0, 2, 4, 6, 1, 3, 5 and 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8).half(),
    }
    assert AwqLinear(KEY, **tensors).dequantise().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert pack_interleaved([range(8)]).tolist() == [[0x75316420]]


def test_zero_points_are_what_is_stored() -> None:
    tensors = {
        "qweight": torch.zeros(1, 1, dtype=torch.int32),
        "qzeros": pack_interleaved([range(8, 16)]),
        "scales": torch.ones(1, 8).half(),
    }
    assert AwqLinear(KEY, **tensors).dequantise().tolist() == [[-zero for zero in range(8, 16)]]


def test_groups_are_consecutive_rows_of_any_number() -> None:
    assert_bit_for_bit(random_awq(96, 16, 4))


def test_scales_of_float32_are_used_as_float16() -> None:
    scales = torch.rand(1, 8, generator=torch.Generator().manual_seed(1)) * 0.1
    assert_bit_for_bit(random_awq(32, 8, 1) | {"scales": scales})


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), octets=st.integers(1, 3), groups=st.integers(1, 5), seed=st.integers(0, 2**32),
    log=st.floats(-24, 12),
)  # fmt: skip
def test_any_layer_is_read_bit_for_bit(rows: int, octets: int, groups: int, seed: int, log: float) -> None:
    assert_bit_for_bit(random_awq(rows * groups, 8 * octets, groups, seed=seed, scales=(2.0**log, 2.0 ** (log + 1))))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"qweight": torch.zeros(64, 4, dtype=torch.int32)}, "qweight is 64 x 4; its layer makes it 64 x 2"),
        ({"qweight": torch.zeros(64, 2)}, "qweight is stored as F32; it must be I32"),
        ({"qweight": torch.zeros((), dtype=torch.int32)}, "qweight is a scalar; its layer makes it"),
        ({"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, "qzeros is 2 x 3; its layer makes it 2 x 2"),
        ({"scales": torch.zeros(2, 32)}, "qweight is 64 x 2; its layer makes it 64 x 4"),
        ({"scales": torch.zeros(16)}, "scales is 16; its layer makes it"),
        (
            {"scales": torch.zeros(3, 16), "qzeros": torch.zeros(3, 2, dtype=torch.int32)},
            "scales has 3 groups, which do not divide 64 input rows evenly",
        ),
        ({"scales": torch.zeros(0, 16), "qzeros": torch.zeros(0, 2, dtype=torch.int32)}, "scales has 0 groups"),
        ({"bias": torch.zeros(8)}, "bias is 8; its layer makes it 16"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadFailed) as refusal:
        AwqLinear(KEY, **(random_awq(64, 16, 2) | changed))
    assert refusal.value.message.startswith(f"the quantised tensor {KEY}.{named}")


def declared(**config: object) -> Quantisation | None:
    return read_quantisation({"quantization_config": {"quant_method": "awq", "bits": 4} | config})


def test_a_config_says_how_many_rows_share_a_scale() -> None:
    assert declared(group_size=128, version="GEMM", zero_point=True) == Quantisation("awq", group_size=128)
    assert declared(group_size=-1, format="gemm") == Quantisation("awq")
    assert declared(modules_to_not_convert=["visual"]) == Quantisation("awq")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"version": "gemv"}, "awq in the version gemv; the torch backend reads the version gemm"),
        ({"version": "GEMV_fast"}, "the version gemv_fast"),
        ({"version": "marlin"}, "the version marlin"),
        ({"format": "llm-awq"}, "the version llm-awq"),
        ({"version": "gemm", "backend": "llm-awq"}, "the version llm-awq"),
        ({"zero_point": False}, "awq without zero points"),
        ({"bits": 8}, "awq of 8 bits"),
        ({"group_size": 0}, "group_size of 0"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name_or_number(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        declared(**config)
