"""Blocks of every format are the numbers that the package gguf makes of them, bit for bit; tensors are made of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from engine.backends.checkpoints import gguf as formats
from engine.backends.checkpoints.gguf import dequantise, read_piece
from engine.errors import ModelLoadFailed
from engine.models.gguf.file import Piece
from engine.models.gguf.header import FORMATS, GgufTensor

Array = np.ndarray[Any, Any]

BLOCKS = {block.name: block for block in FORMATS.values()}
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
"""Those that the package writes."""


def theirs(raw: Array, name: str) -> Array:
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, GGMLQuantizationType[name])


def random_bytes(name: str, rows: int, columns: int) -> Array:
    count = BLOCKS[name].num_bytes * columns // BLOCKS[name].values
    return np.random.default_rng(count).integers(0, 256, (rows, count), dtype=np.uint8)


def quantised(values: Array, name: str) -> Array:
    found: Array = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8)
    return found


def assert_same_bits(found: Array, expected: Array) -> None:
    """All are the same, but that any NaN is another."""
    assert found.shape == expected.shape
    both_nan = np.isnan(found) & np.isnan(expected)
    unsigned = {2: np.uint16, 4: np.uint32}[expected.itemsize]
    assert ((found.view(unsigned) == expected.view(unsigned)) | both_nan).all()


def piece(path: Path, raw: Array, name: str, shape: tuple[int, ...], **more: Any) -> Piece:
    """A tensor of a file that has other bytes before and after it."""
    path.write_bytes(b"before" + raw.tobytes() + b"after")
    return Piece(GgufTensor(path, shape, BLOCKS[name], len(b"before")), **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_are_the_numbers_that_gguf_makes_of_them(name: str) -> None:
    raw = random_bytes(name, 96, 2048)
    assert_same_bits(dequantise(torch.from_numpy(raw), name).numpy(), theirs(raw, name))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_gguf_quantises_is_dequantised_as_gguf_does_it(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((24, 512), dtype=np.float32)
    raw = quantised(values, name)
    found = dequantise(torch.from_numpy(raw), name).numpy()
    assert_same_bits(found, theirs(raw, name))
    assert np.corrcoef(found.ravel(), values.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("name", BLOCKS)
def test_a_matrix_has_its_numbers_in_the_files_floats_or_half_where_it_is_quantised(path: Path, name: str) -> None:
    raw = random_bytes(name, 7, 512)
    found = read_piece(piece(path, raw, name, (7, 512)))
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert found.dtype == plain.get(name, torch.float16)
    with np.errstate(over="ignore"):
        expected = theirs(raw, name).astype(np.float32 if name in ("F32", "BF16") else np.float16)
    assert_same_bits((found.float() if name == "BF16" else found).numpy(), expected)


def test_a_matrix_that_is_made_in_slabs_is_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_bytes("Q6_K", 7, 512)
    whole = read_piece(piece(path, raw, "Q6_K", (7, 512)))
    for values in (1, 512, 1025, 3 * 512):
        monkeypatch.setattr(formats, "_SLAB_VALUES", values)
        assert_same_bits(read_piece(piece(path, raw, "Q6_K", (7, 512))).numpy(), whole.numpy())


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("shape", [(256,), (6, 256), (3, 4, 256), (2, 3, 2, 256)])
def test_a_tensor_of_any_shape_has_it(path: Path, name: str, shape: tuple[int, ...]) -> None:
    raw = random_bytes(name, math.prod(shape[:-1]), shape[-1])
    found = read_piece(piece(path, raw, name, shape)).float().numpy()
    with np.errstate(over="ignore"):
        expected = theirs(raw, name) if name in ("F32", "BF16") else theirs(raw, name).astype(np.float16)
    assert_same_bits(found, expected.astype(np.float32).reshape(shape))


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_K"])
def test_one_of_several_in_a_tensor_is_that_part_of_it(path: Path, name: str) -> None:
    raw = random_bytes(name, 3 * 5, 256)
    whole = read_piece(piece(path, raw, name, (3, 5, 256))).float()
    for index in range(3):
        found = read_piece(piece(path, raw, name, (3, 5, 256), index=index)).float()
        assert_same_bits(found.numpy(), whole[index].numpy())


def test_a_row_of_a_matrix_that_is_a_vector_in_the_file_is_a_matrix_of_one_row(path: Path) -> None:
    raw = random_bytes("F32", 1, 32)
    assert read_piece(piece(path, raw, "F32", (32,), is_row=True)).shape == (1, 32)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_rows_of_heads_are_in_the_order_of_a_model_folder(path: Path, name: str) -> None:
    """As llama.cpp's converter permutes them, undone."""
    heads, size = 3, 8
    values = np.random.default_rng(1).standard_normal((heads * size, 64), dtype=np.float32)
    raw = quantised(values.reshape(heads, 2, size // 2, 64).swapaxes(1, 2).reshape(values.shape), name)
    found = read_piece(piece(path, raw, name, values.shape, heads=heads))
    plain = read_piece(piece(path, quantised(values, name), name, values.shape))
    assert torch.equal(found, plain)


def test_a_bias_of_heads_is_in_the_order_of_a_model_folder(path: Path) -> None:
    values = np.arange(24, dtype=np.float32)
    raw = values.reshape(3, 2, 4).swapaxes(1, 2).reshape(24)
    assert read_piece(piece(path, raw, "F32", (24,), heads=3)).tolist() == values.tolist()


@pytest.mark.parametrize(("name", "shape"), [("F32", (25, 32)), ("Q8_0", (25, 32)), ("F32", (27,)), ("Q8_0", (96,))])
def test_rows_that_are_not_those_of_the_heads_are_refused(path: Path, name: str, shape: tuple[int, ...]) -> None:
    raw = random_bytes(name, math.prod(shape[:-1]), shape[-1])
    with pytest.raises(ModelLoadFailed, match="rows is not one of 6 heads"):
        read_piece(piece(path, raw, name, shape, heads=6))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_one_is_taken_from_the_norms_that_have_one_more(path: Path, name: str) -> None:
    raw = quantised(np.linspace(0.5, 2, 64, dtype=np.float32).reshape(1, 64), name)
    plain = read_piece(piece(path, raw, name, (64,)))
    found = read_piece(piece(path, raw, name, (64,), less_one=True))
    assert found.dtype == torch.float32
    assert torch.equal(found, plain.float() - 1)


def test_a_file_that_became_shorter_is_refused(path: Path) -> None:
    found = piece(path, random_bytes("F32", 4, 32), "F32", (4, 32))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelLoadFailed, match="became shorter while it was read"):
        read_piece(found)
