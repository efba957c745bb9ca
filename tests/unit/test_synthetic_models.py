"""Models of a known shape with random weights."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.errors import InvalidRequest
from engine.models.files import read_json_object
from engine.models.headers import read_header
from engine.models.inspect import inspect
from tools import synthetic_models as synthetic
from tools.synthetic_models import sketch_synthetic

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 600,
    "tie_word_embeddings": True,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(synthetic, "SHAPES", {"small": SMALL, "untied": SMALL | {"tie_word_embeddings": False}})
    return "small"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def test_a_gguf_file_that_the_disk_cannot_take_leaves_nothing_and_one_that_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tools import synthetic_gguf

    file = tmp_path / "model.gguf"
    monkeypatch.setattr(synthetic, "SHAPES", {"small": SMALL | {"intermediate_size": 64}})
    synthetic_gguf.write_synthetic_gguf("small", "Q8_0", file)
    assert inspect(file).problem == ""
    whole = file.read_bytes()
    write = synthetic_gguf.gguf.GGUFWriter.write_tensor_data
    written: list[str] = []

    def full(writer: Any, tensor: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append("tensor")
        write(writer, tensor)

    monkeypatch.setattr(synthetic_gguf.gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match="No space left"):
        synthetic_gguf.write_synthetic_gguf("small", "Q8_0", file, seed=1)
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]
    assert file.read_bytes() == whole


def test_each_llama_shape_has_the_tensors_that_transformers_keeps_for_it() -> None:
    for shape in (name for name in synthetic.SHAPES if name != "mixtral-tiny"):
        config = synthetic.synthetic_config(shape)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "synthetic"}))
        kept = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        assert kept == synthetic.tensor_shapes(config), shape


def test_a_shape_has_the_parameters_of_its_name() -> None:
    def millions(shape: str) -> float:
        shapes = synthetic.tensor_shapes(synthetic.synthetic_config(shape))
        return sum(torch.Size(size).numel() for size in shapes.values()) / 1e6

    assert {shape: round(millions(shape)) for shape in synthetic.SHAPES} == {
        "135m": 135,
        "0.5b": 467,
        "1b": 1236,
        "3b": 3213,
        "7b": 6738,
        "13b": 13016,
        "mixtral-tiny": 140,
    }


def test_a_synthetic_folder_loads_in_transformers_and_its_answers_are_finite(small: str, tmp_path: Path) -> None:
    folder = synthetic.make_synthetic(small, tmp_path / "model")
    logits = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(16)[None]).logits
    assert logits.isfinite().all()
    assert (inspect(folder).problem, inspect(folder).dtype) == ("", "bfloat16")


def test_shards_hold_together_what_one_file_would(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights(synthetic.make_synthetic("untied", tmp_path / "one"))
    monkeypatch.setattr(synthetic, "_SHARD_BYTES", 20_000)
    folder = synthetic.make_synthetic("untied", tmp_path / "many")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert weights(folder).keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(folder).items())
    assert inspect(folder).problem == ""


def test_a_folder_is_made_once_and_again_for_another_seed(small: str, tmp_path: Path) -> None:
    file = synthetic.make_synthetic(small, tmp_path) / "model.safetensors"
    first, made = weights(tmp_path), file.stat().st_mtime_ns
    synthetic.make_synthetic(small, tmp_path)
    assert file.stat().st_mtime_ns == made
    synthetic.make_synthetic(small, tmp_path, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(tmp_path)[name], first[name])


def test_the_bytes_made_are_told_to_the_last(small: str, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    folder = synthetic.make_synthetic("small-4.0bpw", tmp_path, report=lambda *each: reports.append(each))
    stored = sum(tensor.nbytes for tensor in weights(folder).values())
    assert reports[-1] == (stored, stored)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


def test_every_id_is_a_token_with_text_and_text_comes_back(small: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(synthetic.make_synthetic(small, tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL["vocab_size"]
    assert all(tokenizer.decode([number]) for number in range(3, 600))
    for text in ("The quick brown fox, 42!", "Grüße, 世界"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_command_makes_a_model_or_a_sketch_of_it(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert synthetic.main([small, str(tmp_path / "made")]) == 0
    assert "100% of small" in capsys.readouterr().err
    assert synthetic.main([small, str(tmp_path / "sketch"), "--sketch"]) == 0
    assert _told(tmp_path / "sketch") == _told(tmp_path / "made")
    assert synthetic.main(["2b", str(tmp_path / "none")]) == 2
    assert "no synthetic shape" in capsys.readouterr().err


def test_an_unknown_shape_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r'no synthetic shape "2b"; there are 135m, 0\.5b'):
        synthetic.make_synthetic("2b", tmp_path)


@pytest.mark.parametrize("shape", ["small", "untied", "small-4.0bpw"])
def test_a_sketch_tells_of_a_model_what_the_made_one_does(small: str, tmp_path: Path, shape: str) -> None:
    made, sketch = tmp_path / "made", tmp_path / "sketch"
    sketch.mkdir()
    synthetic.make_synthetic(shape, made)
    sketch_synthetic(shape, sketch)
    assert _told(sketch) == _told(made)
    assert read_json_object(sketch / "config.json") == read_json_object(made / "config.json")
    assert (inspect(sketch).problem, inspect(sketch).parameters) == ("", inspect(made).parameters)


def test_a_sketch_takes_no_room(tmp_path: Path) -> None:
    file = sketch_synthetic("7b", tmp_path) / "model.safetensors"
    assert file.stat().st_size > 13e9
    assert file.stat().st_blocks * 512 < 1e6


def _told(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (each.dtype, each.shape) for name, each in read_header(folder / "model.safetensors").items()}
