"""The FP8 reader gives the weights of the formats' rules bit for bit, and names what is malformed or not read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.checkpoints.fp8 import Fp8Codes, dequantise
from engine.backends.common.quant_config import FP8_BLOCK, Quantisation, read_quantisation
from engine.backends.torch.weights.reader import locate_weights
from engine.errors import ModelLoadFailed, UnsupportedModel
from tests.fakes.fp8_tensors import Kind, dequantise_by_rules, random_fp8, value_of

BLOCKS = Quantisation("fp8", fp8_block=(128, 128))


def read(folder: Path, tensors: dict[str, Tensor], declared: Quantisation | None = None) -> Tensor:
    """The weight of a layer that is stored as `tensors`."""
    save_file({f"layer.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    shape = {"layer.weight": tuple(tensors["weight"].shape)}
    return locate_weights(Checkpoint.open(folder), shape, declared)["layer.weight"].read(torch.device("cpu"))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_byte_is_the_number_that_the_format_says(kind: Kind, dtype: torch.dtype) -> None:
    expected = torch.tensor([[value_of(byte, kind) for byte in range(256)]])
    stored = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 256)
    found = dequantise(Fp8Codes(stored, torch.ones(1, 1), (1, 256)))
    is_number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found[is_number], expected[is_number])


def test_the_largest_and_smallest_numbers_are_those_of_the_standard() -> None:
    assert (value_of(0x7E, "e4m3"), value_of(0x01, "e4m3"), value_of(0xC0, "e4m3")) == (448, 2**-9, -2)
    assert (value_of(0x7B, "e5m2"), value_of(0x01, "e5m2"), value_of(0xFC, "e5m2")) == (57344, 2**-16, -math.inf)


@pytest.mark.parametrize("declared", [BLOCKS, None])
@pytest.mark.parametrize("shape", [(256, 128), (130, 140), (1, 129), (64, 64)])
def test_each_block_of_128_by_128_has_its_scale_cut_ones_too(
    tmp_path: Path, shape: tuple[int, int], declared: Quantisation | None
) -> None:
    tensors = random_fp8(*shape, FP8_BLOCK)
    assert_same_bits(read(tmp_path, tensors, declared), dequantise_by_rules(tensors, FP8_BLOCK))


def test_a_weight_with_more_rows_than_are_made_at_a_time_is_read_whole(tmp_path: Path) -> None:
    tensors = random_fp8(1100, 24, FP8_BLOCK)
    assert_same_bits(read(tmp_path, tensors, BLOCKS), dequantise_by_rules(tensors, FP8_BLOCK))


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
def test_one_scale_may_be_for_the_whole_weight(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    tensors = random_fp8(200, 48, (200, 48), scale_name="weight_scale")
    expected = dequantise_by_rules(tensors, (200, 48))
    found = read(tmp_path, tensors | {"weight_scale": tensors["weight_scale"].reshape(scale_shape)})
    assert_same_bits(found, expected)


@pytest.mark.parametrize("scale_shape", [(200,), (200, 1)])
def test_each_row_may_have_its_scale(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    tensors = random_fp8(200, 48, (1, 48), scale_name="weight_scale")
    expected = dequantise_by_rules(tensors, (1, 48))
    found = read(tmp_path, tensors | {"weight_scale": tensors["weight_scale"].reshape(scale_shape)})
    assert_same_bits(found, expected)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), down=st.integers(1, 48), across=st.integers(1, 48),
    kind=st.sampled_from(["e4m3", "e5m2"]), half=st.booleans(), seed=st.integers(0, 2**32), log=st.floats(-30, 10),
)  # fmt: skip
def test_any_layer_is_read_bit_for_bit(
    rows: int, columns: int, down: int, across: int, kind: Kind, half: bool, seed: int, log: float
) -> None:
    block, scales = (down, across), (2.0**log, 2.0 ** (log + 1))
    scale_dtype = torch.bfloat16 if half else torch.float32
    tensors = random_fp8(rows, columns, block, seed=seed, kind=kind, scale_dtype=scale_dtype, scales=scales)
    found = dequantise(Fp8Codes(tensors["weight"], tensors["weight_scale_inv"], block))
    assert_same_bits(found, dequantise_by_rules(tensors, block))


@pytest.mark.parametrize(
    ("shape", "declared", "problem"),
    [
        ((2, 1), BLOCKS, "is 2 x 1; its layer makes it 2 x 2"),
        ((), BLOCKS, "is a scalar; its layer makes it 2 x 2"),
        ((3, 2), None, "is 3 x 2; its layer makes it 2 x 2 or a scalar or 1 or 1 x 1 or 256 or 256 x 1"),
    ],
)
def test_scales_that_fit_no_way_of_sharing_them_are_named(
    tmp_path: Path, shape: tuple[int, ...], declared: Quantisation | None, problem: str
) -> None:
    tensors = random_fp8(256, 256, FP8_BLOCK) | {"weight_scale_inv": torch.ones(shape)}
    with pytest.raises(ModelLoadFailed) as refusal:
        read(tmp_path, tensors, declared)
    assert refusal.value.message == f"the quantised tensor layer.weight_scale_inv {problem}"


def test_scales_that_are_powers_of_two_in_a_byte_are_refused(tmp_path: Path) -> None:
    scales = torch.full((2, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ModelLoadFailed, match=r"weight_scale_inv is stored as F8_E8M0; it must be F32 or BF16 or F16"):
        read(tmp_path, random_fp8(256, 256, FP8_BLOCK) | {"weight_scale_inv": scales}, BLOCKS)


def compressed(**weights: object) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
    }


def declared(config: dict[str, Any]) -> Quantisation | None:
    return read_quantisation({"quantization_config": config})


def test_a_config_says_which_blocks_share_a_scale() -> None:
    assert declared({"quant_method": "fp8", "weight_block_size": [128, 64]}) == Quantisation("fp8", fp8_block=(128, 64))
    assert declared({"quant_method": "fp8", "activation_scheme": "static"}) == Quantisation("fp8")
    assert declared(compressed()) == declared(compressed(strategy="tensor")) == Quantisation("fp8")
    blocks = compressed(strategy="block", block_structure=[128, 128])
    assert declared(blocks) == BLOCKS


X_SCHEME = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("scheme", "rounds"),
    [(X_SCHEME, True), (X_SCHEME | {"dynamic": False}, False), (X_SCHEME | {"num_bits": 16}, False), (None, False)],
)
def test_a_config_says_whether_x_is_meant_to_be_in_8_bits(scheme: dict[str, Any] | None, rounds: bool) -> None:
    config = compressed()
    config["config_groups"]["group_0"]["input_activations"] = scheme
    assert declared(config) == Quantisation("fp8", fp8_activations=rounds)
    named = declared({"quant_method": "fp8", "activation_scheme": "dynamic" if rounds else "static"})
    assert named == Quantisation("fp8", fp8_activations=rounds)


def test_groups_of_layers_that_differ_in_their_blocks_leave_it_to_the_tensors() -> None:
    mixed = compressed(strategy="block", block_structure=[64, 64])
    mixed["config_groups"] |= {"group_1": compressed()["config_groups"]["group_0"]}
    assert declared(mixed) == Quantisation("fp8")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"fp8 in blocks of \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"fp8 in blocks of \[0, 128\]"),
        (compressed(num_bits=4), "compressed-tensors in the format float-quantized"),
        (compressed(type="int"), "reads floats of 8 bits with a scale for each tensor, channel, block"),
        (compressed(strategy="group"), "compressed-tensors"),
        (compressed(symmetric=False), "compressed-tensors"),
        (compressed() | {"config_groups": {}}, "compressed-tensors"),
        (compressed() | {"config_groups": {"group_0": None}}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors"}, "in the format unknown"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name_or_number(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        declared(config)
