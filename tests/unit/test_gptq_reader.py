"""The GPTQ reader gives the weights of the format's rules bit for bit, and names what is malformed or not read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.checkpoints.gptq import GptqLinear
from engine.backends.common.quant_config import Quantisation, gptq_group_size, read_quantisation
from engine.errors import ModelLoadFailed, UnsupportedModel
from tests.fakes.exl2_tensors import pack_nibbles
from tests.fakes.gptq_tensors import dequantise_by_rules, random_gptq

KEY = "model.layers.0.mlp.up_proj"


def consecutive(rows: int, size: int) -> list[int]:
    return [row // size for row in range(rows)]


def assert_bit_for_bit(tensors: dict[str, Tensor], row_groups: list[int], *, zero_offset: int = 1) -> None:
    found = GptqLinear(KEY, **tensors, zero_offset=zero_offset).dequantise()
    expected = dequantise_by_rules(tensors, row_groups, zero_offset=zero_offset)
    assert found.dtype == torch.float16
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("rows", "groups", "size"), [(64, 1, 64), (64, 2, 32), (96, 3, 32), (80, 3, 32), (64, 3, 32)])
def test_without_an_index_the_groups_are_consecutive_rows(rows: int, groups: int, size: int) -> None:
    assert gptq_group_size(rows, groups) == size
    assert_bit_for_bit(random_gptq(rows, 16, groups), consecutive(rows, size))


def test_an_index_of_zeros_means_consecutive_rows_too() -> None:
    assert_bit_for_bit(random_gptq(64, 16, 2, g_idx=[0] * 64), consecutive(64, 32))


def test_rows_in_activation_order_take_the_group_that_the_index_names() -> None:
    row_groups = consecutive(128, 32)
    random.Random(3).shuffle(row_groups)
    assert_bit_for_bit(random_gptq(128, 24, 4, g_idx=row_groups), row_groups)


def test_groups_of_uneven_size_are_followed() -> None:
    row_groups = [0] * 5 + [1] * 40 + [0] * 19
    assert_bit_for_bit(random_gptq(64, 8, 2, g_idx=row_groups), row_groups)


def test_a_stored_zero_of_15_means_16() -> None:
    tensors = random_gptq(8, 8, 1) | {"qzeros": pack_nibbles([[15] * 8]), "scales": torch.ones(1, 8).half()}
    tensors["qweight"] = torch.zeros(1, 8, dtype=torch.int32)
    assert GptqLinear(KEY, **tensors).dequantise().unique().tolist() == [-16.0]


def test_zeros_of_the_second_format_are_what_is_stored() -> None:
    tensors = random_gptq(64, 16, 2) | {"qzeros": pack_nibbles([[0] * 16, [15] * 16])}
    assert_bit_for_bit(tensors, consecutive(64, 32), zero_offset=0)


def test_scales_of_float32_are_used_as_float16() -> None:
    tensors = random_gptq(32, 8, 1)
    tensors["scales"] = torch.rand(1, 8, generator=torch.Generator().manual_seed(1)) * 0.1
    assert_bit_for_bit(tensors, [0] * 32)


def test_a_bias_is_kept_beside_the_matrix() -> None:
    tensors = random_gptq(32, 8, 1, bias=True)
    assert GptqLinear(KEY, **tensors).bias is tensors["bias"]


@settings(max_examples=25, deadline=None)
@given(
    words=st.integers(1, 20), octets=st.integers(1, 3), groups=st.integers(1, 5), seed=st.integers(0, 2**32),
    log=st.floats(-24, 12),
)  # fmt: skip
def test_any_layer_is_read_bit_for_bit(words: int, octets: int, groups: int, seed: int, log: float) -> None:
    rows = 8 * words
    row_groups = random.Random(seed).choices(range(groups), k=rows)
    row_groups[0] = groups - 1
    tensors = random_gptq(rows, 8 * octets, groups, g_idx=row_groups, seed=seed, scales=(2.0**log, 2.0 ** (log + 1)))
    assert_bit_for_bit(tensors, row_groups if any(row_groups) else [0] * rows)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"qweight": torch.zeros(16, 16, dtype=torch.int32)}, "qweight has 8-bit values; only 4-bit GPTQ"),
        ({"qweight": torch.zeros(4, 16, dtype=torch.int32)}, "qweight has 2-bit values; only 4-bit GPTQ"),
        ({"qweight": torch.zeros(6, 16, dtype=torch.int32)}, "qweight has 3-bit values; only 4-bit GPTQ"),
        ({"qweight": torch.zeros(9, 16, dtype=torch.int32)}, "qweight is 9 x 16; its layer makes it 8 x 16"),
        ({"qweight": torch.zeros(8, 16)}, "qweight is stored as F32; it must be I32"),
        ({"qweight": torch.zeros(8, dtype=torch.int32)}, "qweight is 8; its layer makes it"),
        ({"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, "qzeros is 2 x 3; its layer makes it 2 x 2"),
        ({"scales": torch.zeros(2, 15)}, "scales is 2 x 15; its layer makes it 2 x 16"),
        ({"scales": torch.zeros(0, 16), "qzeros": torch.zeros(0, 2, dtype=torch.int32)}, "scales has 0 groups"),
        ({"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "g_idx names groups outside the 2 that exist"),
        ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "g_idx names groups outside the 2 that exist"),
        ({"g_idx": torch.zeros(64)}, "g_idx is stored as F32; it must be I32"),
        ({"bias": torch.zeros(8)}, "bias is 8; its layer makes it 16"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    tensors = random_gptq(64, 16, 2, g_idx=consecutive(64, 32)) | changed
    with pytest.raises(ModelLoadFailed) as refusal:
        GptqLinear(KEY, **tensors)
    assert refusal.value.message.startswith(f"the quantised tensor {KEY}.{named}")


def declared(**config: object) -> Quantisation | None:
    return read_quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4} | config})


def test_a_config_says_how_gptq_keeps_its_zero_points() -> None:
    assert declared(group_size=128) == Quantisation("gptq", group_size=128, gptq_zero_offset=1)
    assert declared(checkpoint_format="gptq", group_size=-1) == Quantisation("gptq", gptq_zero_offset=1)
    assert declared(checkpoint_format="gptq_v2") == Quantisation("gptq", gptq_zero_offset=0)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bits": 8}, "gptq of 8 bits"),
        ({"bits": 3}, "gptq of 3 bits"),
        ({"checkpoint_format": "marlin"}, "checkpoint format marlin"),
        ({"is_marlin_format": True}, "checkpoint format marlin"),
        ({"group_size": 96}, "group_size of 96"),
        ({"quant_method": "aqlm"}, "aqlm"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name_or_number(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        declared(**config)
