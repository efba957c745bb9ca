"""A Llama's tensors as llama.cpp reads them."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from tools.benchmarks.convert.llama_tensors import (
    as_float32,
    bfloat16_tensors,
    gguf_name,
    laid_out,
    permuted,
)
from tools.benchmarks.engines import AMX, ROWS, chosen
from tools.synthetic_models import synthetic_config, tensor_shapes


def test_every_tensor_of_a_llama_has_a_name_of_its_own_there() -> None:
    names = [gguf_name(name) for name in tensor_shapes(synthetic_config("7b"))]
    assert len(set(names)) == len(names) == 3 + 32 * 9
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.31.ffn_down.weight"} < set(names)
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.block_sparse_moe.gate.weight")


def test_rotary_pairs_become_neighbours_within_each_head() -> None:
    rows = numpy.arange(2 * 6)[:, None]
    assert permuted(rows, heads=2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_only_queries_and_keys_are_laid_out_anew() -> None:
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    weight = numpy.arange(8 * 3).reshape(8, 3)
    assert laid_out("model.layers.0.self_attn.q_proj.weight", weight, config)[:4, 0].tolist() == [0, 6, 3, 9]
    assert laid_out("model.layers.0.self_attn.k_proj.weight", weight, config)[:4, 0].tolist() == [0, 12, 3, 15]
    assert laid_out("model.layers.0.self_attn.v_proj.weight", weight, config) is weight


def test_bfloat16_is_read_bit_by_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = dict(bfloat16_tensors(tmp_path / "model.safetensors"))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert numpy.array_equal(as_float32(read[name]), tensor.float().numpy())


def test_rows_that_only_tiles_tell_apart_are_for_a_cpu_with_tiles() -> None:
    tiled = {row.key for row in ROWS if row.needs == AMX}
    assert tiled
    assert tiled.isdisjoint(row.key for row in chosen(None, goals_only=False))
    assert tiled <= {row.key for row in chosen(None, goals_only=False, flags=["avx2", AMX])}
