"""The EXL3 reader gives the weights of the format's rules bit for bit, and names what is malformed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.checkpoints.exl3 import Exl3Linear, codebook_values, hadamard_matrix, require_exl3
from engine.backends.checkpoints.quantized_tensors import TensorPart
from engine.backends.torch.weights.reader import locate_weights
from engine.errors import ModelLoadFailed
from tests.fakes.exl3_tensors import (
    Codebook,
    added_bits,
    dequantise_by_rules,
    element_of,
    pack_tile,
    random_exl3,
    rotated_by_rules,
    sums_in_order,
    tile_windows,
    window_value,
)

KEY = "model.layers.0.mlp.down_proj"
CODEBOOKS: tuple[Codebook, ...] = ("plain", "mcg", "mul1")
BITS = (1, 2, 3, 4, 5, 6, 7, 8)
HALF_BITS = (1.5, 2.5, 3.5)


def decoded(tensors: dict[str, Tensor], in_features: int, out_features: int) -> Tensor:
    """The weight, [out, in]."""
    weight = torch.full((out_features, in_features), torch.nan, dtype=torch.float16)
    Exl3Linear(KEY, **tensors).write(weight)
    return weight


def bits_of(matrix: Tensor) -> Tensor:
    """float16 as its bits: -0 differs from 0."""
    assert matrix.dtype == torch.float16
    return matrix.contiguous().view(torch.int16)


def assert_by_the_rules(tensors: dict[str, Tensor], in_features: int, out_features: int) -> None:
    """Every bit is the rules', where torch makes its sums in their order; elsewhere a sum at a tie of float16 may be
    rounded to the other side, and nothing else differs."""
    found = decoded(tensors, in_features, out_features)
    expected = dequantise_by_rules(tensors, in_features, out_features).t()
    differs = bits_of(found) != bits_of(expected)
    if sums_in_order():
        assert not differs.any()
    assert differs.float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=2**-9 * expected.abs().max().item())


@pytest.mark.parametrize("bits", [*BITS, *HALF_BITS])
def test_a_tile_is_one_ring_of_bits_that_every_value_is_a_window_of(bits: float) -> None:
    words = random_exl3(128, 128, bits, codebook="mul1")["trellis"][0, 0].tolist()
    windows = tile_windows(words, bits)
    assert pack_tile(windows, bits) == words
    for window, after, added in zip(
        windows, [*windows[1:], windows[0]], [*added_bits(bits)[1:], int(bits)], strict=True
    ):
        assert after >> added == window & (0xFFFF >> added)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_codebook_has_the_value_of_every_window(codebook: Codebook) -> None:
    expected = np.array([window_value(window, codebook) for window in range(1 << 16)])
    values = codebook_values(codebook)
    assert torch.equal(bits_of(values.half()), bits_of(torch.from_numpy(expected)))
    assert torch.equal(values, values.half().float())


def test_the_hadamard_matrix_is_its_own_inverse_and_has_the_sign_of_common_bits() -> None:
    matrix = hadamard_matrix()
    torch.testing.assert_close(matrix @ matrix, torch.eye(128))
    for row, column in ((0, 0), (1, 1), (3, 5), (127, 127), (64, 65)):
        assert (matrix[row, column] < 0).item() == bool((row & column).bit_count() % 2)


def test_every_element_of_a_tile_is_one_value() -> None:
    assert len({element_of(value) for value in range(256)}) == 256


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_every_width_is_read_in_every_codebook(bits: int, codebook: Codebook) -> None:
    assert_by_the_rules(random_exl3(128, 128, bits, codebook=codebook, seed=bits), 128, 128)


@pytest.mark.parametrize("bits", HALF_BITS)
def test_half_bits_are_read_in_the_codebook_that_has_them(bits: float) -> None:
    assert_by_the_rules(random_exl3(128, 128, bits, codebook="mul1"), 128, 128)


@pytest.mark.parametrize(("bits", "codebook"), [(1, "plain"), (4, "mcg"), (3, "mul1"), (2.5, "mul1")])
def test_values_lie_where_a_tensor_core_has_them(bits: float, codebook: Codebook) -> None:
    """Transformed twice, the values are there again."""
    tensors = random_exl3(128, 128, bits, codebook=codebook)
    tensors["suh"], tensors["svh"] = torch.ones(128).half(), torch.ones(128).half()
    twice = hadamard_matrix().double()
    back = twice @ decoded(tensors, 128, 128).t().double() @ twice
    torch.testing.assert_close(back, torch.from_numpy(rotated_by_rules(tensors)).double(), rtol=0, atol=0.02)


@pytest.mark.parametrize(("in_features", "out_features"), [(384, 256), (128, 640), (1024, 128)])
def test_blocks_of_128_are_transformed_by_themselves(in_features: int, out_features: int) -> None:
    assert_by_the_rules(random_exl3(in_features, out_features, 3, codebook="mcg"), in_features, out_features)


@pytest.mark.parametrize(("in_features", "out_features"), [(100, 128), (128, 130), (40, 1)])
def test_features_of_padding_are_left_out(in_features: int, out_features: int) -> None:
    assert_by_the_rules(random_exl3(in_features, out_features, 2), in_features, out_features)


def test_packed_signs_are_read_as_scales_of_one() -> None:
    tensors = random_exl3(128, 256, 4, codebook="mcg", signs="su")
    assert_by_the_rules(tensors, 128, 256)
    signs = {"su": [1] * 128, "sv": [1] * 256}
    for name, each in signs.items():
        for place in range(len(each)):
            each[place] = -1 if tensors[name][place // 16].item() >> (place % 16) & 1 else 1
    plain = {"suh": torch.tensor(signs["su"]).half(), "svh": torch.tensor(signs["sv"]).half()}
    unpacked = {name: tensor for name, tensor in tensors.items() if name not in signs} | plain
    assert torch.equal(decoded(tensors, 128, 256), decoded(unpacked, 128, 256))


def test_scales_count_where_packed_signs_are_stored_next_to_them() -> None:
    tensors = random_exl3(128, 128)
    signs = random_exl3(128, 128, signs="su")
    both = tensors | {"su": signs["su"], "sv": signs["sv"]}
    assert torch.equal(decoded(both, 128, 128), decoded(tensors, 128, 128))


def test_a_layer_wider_than_what_is_decoded_at_a_time_is_read_whole() -> None:
    tensors = random_exl3(128, 4 * 4096 + 128, 2)
    weight = decoded(tensors, 128, 4 * 4096 + 100)
    assert weight.isfinite().all()
    last = tensors | {"trellis": tensors["trellis"][:, -8:], "svh": tensors["svh"][-128:]}
    assert torch.equal(weight[-100:], decoded(last, 128, 100))


def test_layers_of_a_folder_may_differ_in_bits_and_codebook(tmp_path: Path) -> None:
    layers = {
        "a": random_exl3(128, 128, 6, codebook="mcg"),
        "b": random_exl3(128, 256, 3, signs="su"),
        "c": random_exl3(256, 128, 1.5, codebook="mul1"),
    }
    stored = {f"{key}.{name}": tensor for key, tensors in layers.items() for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    shapes = {"a.weight": (128, 128), "b.weight": (256, 128), "c.weight": (128, 256)}
    weights = locate_weights(Checkpoint.open(tmp_path), shapes, None)
    for key, tensors in layers.items():
        out_features, in_features = shapes[f"{key}.weight"]
        expected = decoded(tensors, in_features, out_features)
        assert torch.equal(weights[f"{key}.weight"].read(torch.device("cpu")), expected)


@pytest.mark.parametrize(
    ("name", "part", "problem"),
    [
        ("trellis", None, "is missing"),
        ("trellis", TensorPart((8, 16, 64), "I16"), "is 8 x 16 x 64; its layer makes it 8 x 8 x 64"),
        ("trellis", TensorPart((8, 64), "I16"), "is 8 x 64; its layer makes it 8 x 8 x 64"),
        ("trellis", TensorPart((), "I16"), "is a scalar; its layer makes it 8 x 8 x 0"),
        ("trellis", TensorPart((8, 8, 64), "I32"), "is stored as I32; it must be I16"),
        ("trellis", TensorPart((8, 8, 144), "I16"), "has tiles of 144 words, 9 bits per weight"),
        ("trellis", TensorPart((8, 8, 0), "I16"), "has tiles of 0 words, 0 bits per weight"),
        ("trellis", TensorPart((8, 8, 40), "I16"), "has tiles of 40 words, 2.5 bits per weight"),
        ("suh", None, "is missing"),
        ("suh", TensorPart((100,), "F16"), "is 100; its layer makes it 128"),
        ("suh", TensorPart((128,), "F32"), "is stored as F32; it must be F16"),
        ("svh", TensorPart((256,), "F16"), "is 256; its layer makes it 128"),
        ("svh", TensorPart((128,), "BF16"), "is stored as BF16; it must be F16"),
        ("mcg", TensorPart((1,), "I32"), "is 1; its layer makes it a scalar"),
        ("mcg", TensorPart((), "F32"), "is stored as F32; it must be I32"),
        ("mul1", TensorPart((), "I32"), "names a second codebook next to mcg"),
        ("bias", TensorPart((100,), "F16"), "is 100; its layer makes it 128"),
        ("bias", TensorPart((128,), "I16"), "is stored as I16"),
    ],
)
def test_a_malformed_tensor_is_named_by_its_header_alone(name: str, part: TensorPart | None, problem: str) -> None:
    parts = {
        "trellis": TensorPart((8, 8, 64), "I16"),
        "suh": TensorPart((128,), "F16"),
        "svh": TensorPart((128,), "F16"),
        "mcg": TensorPart((), "I32"),
    }
    changed = {each: found for each, found in {**parts, name: part}.items() if found is not None}
    with pytest.raises(ModelLoadFailed) as refusal:
        require_exl3(KEY, changed, 128, 100)
    assert refusal.value.message.startswith(f"the quantised tensor {KEY}.{name} {problem}")
    assert refusal.value.details["tensor"] == f"{KEY}.{name}"


@pytest.mark.parametrize(("name", "features"), [("su", 8), ("sv", 8)])
def test_packed_signs_of_another_size_are_named(name: str, features: int) -> None:
    parts = {
        "trellis": TensorPart((8, 8, 64), "I16"),
        "su": TensorPart((8,), "I16"),
        "sv": TensorPart((8,), "I16"),
        name: TensorPart((features + 1,), "I16"),
    }
    with pytest.raises(ModelLoadFailed, match=rf"{name} is 9; its layer makes it 8$"):
        require_exl3(KEY, parts, 128, 128)


def test_another_multiplier_than_the_codebooks_is_named() -> None:
    tensors = random_exl3(128, 128, codebook="mcg") | {"mcg": torch.tensor(5, dtype=torch.int32)}
    with pytest.raises(ModelLoadFailed, match=r"mcg is 0x5; the codebook's multiplier is 0xcbac1fed$"):
        Exl3Linear(KEY, **tensors)


def test_tensors_that_do_not_fit_together_are_named() -> None:
    tensors = random_exl3(128, 128) | {"svh": torch.ones(64).half()}
    with pytest.raises(ModelLoadFailed, match=r"svh is 64; its layer makes it 128$"):
        Exl3Linear(KEY, **tensors)
