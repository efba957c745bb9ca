"""GGUF files of a known shape: names that llama.cpp has for tensors, and formats of matrices."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest

from tools.synthetic_gguf import gguf_name, write_synthetic_gguf
from tools.synthetic_models import synthetic_config, tensor_shapes


def test_every_tensor_of_a_llama_has_a_name_of_its_own_there() -> None:
    names = [gguf_name(name) for name in tensor_shapes(synthetic_config("7b"))]
    assert len(set(names)) == len(names) == 3 + 32 * 9
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.31.ffn_down.weight"} < set(names)
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.block_sparse_moe.gate.weight")


@pytest.mark.parametrize(("kind", "embedding"), [("BF16", "BF16"), ("Q4_0", "Q8_0")])
def test_rows_that_are_no_blocks_of_the_outer_format_fall_back_to_one_of_8_bits(
    tmp_path: Path, kind: str, embedding: str
) -> None:
    write_synthetic_gguf("135m", kind, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == kind
    assert tensors["token_embd.weight"].tensor_type.name == embedding
    weights = gguf.dequantize(tensors["blk.0.ffn_up.weight"].data, tensors["blk.0.ffn_up.weight"].tensor_type)
    assert weights.shape == (1536, 576)
    assert abs(float(numpy.mean(weights))) < float(numpy.std(weights)) / 5
    assert 0.7 < float(numpy.std(weights)) * 576**0.5 < 1.5
