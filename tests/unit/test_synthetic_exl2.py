"""Synthetic models in EXL2: files that are read as any other, with about as many bits as were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.backends.checkpoints.exl2 import PARTS, Exl2Linear
from engine.errors import InvalidRequest
from engine.models.inspect import inspect
from tools import synthetic_models as synthetic
from tools.exl2_writer.bit_allocation import MatrixShape
from tools.synthetic_models import group_widths, random_linear

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 600,
    "tie_word_embeddings": True,
}


def layer(rows: int, columns: int, bits: float) -> tuple[Exl2Linear, int]:
    """A layer, and the bits that it takes in all."""
    parts = random_linear(rows, columns, bits, torch.Generator().manual_seed(0))
    return Exl2Linear(key="layer", **parts), 8 * sum(tensor.nbytes for tensor in parts.values())


@pytest.mark.parametrize("bits", [2.5, 4.0, 6.0, 8.0])
def test_a_layer_has_about_the_bits_and_the_deviation_that_were_asked_for(bits: float) -> None:
    packed, size = layer(1024, 512, bits)
    assert bits - 0.5 <= size / (1024 * 512) <= bits
    weight = packed.dequantise().float()
    assert weight.shape == (1024, 512)
    assert weight.std().item() == pytest.approx(1024**-0.5, rel=0.15)


def test_widths_fall_as_the_format_wants_them() -> None:
    widths = group_widths(MatrixShape(4096, 4096, 128), 4.3)
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 2


def test_an_exl2_folder_is_complete_and_inspected_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "SHAPES", {"small": SMALL})
    folder = synthetic.make_synthetic("small-4.0bpw", tmp_path / "model")
    entry = inspect(folder)
    assert (entry.problem, entry.quantisation) == ("", "exl2 4.0 bpw")
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        assert {f"{name}.{part}" for part in PARTS if part != "bias"} <= tensors.keys()
    assert tensors["model.embed_tokens.weight"].dtype == torch.float16
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("shape", ["7b-1bpw", "7b-9.5bpw"])
def test_bits_that_the_format_has_not_are_refused(shape: str) -> None:
    with pytest.raises(InvalidRequest, match=r"EXL2 has 2\.2 to 8\.0 bits"):
        synthetic.synthetic_config(shape)
