"""Weights are read from safetensors alone, and what is wrong with them is said by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.base import LoadProgress
from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec
from engine.errors import LoadCancelled, ModelLoadFailed, UnsafeWeights, UnsupportedModel
from tests.fakes.adapters import make_adapter
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

SINGLE = "model.safetensors"


def load(folder: Path, *, stop_after: int | None = None) -> list[LoadProgress]:
    """Load and unload, returning the weights' progress; cancelled once `stop_after` tensors were read."""
    seen: list[LoadProgress] = []
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", device="cpu")
    runner = ModelRunner.load(
        folder,
        spec,
        report=lambda progress: seen.append(progress) if progress.phase == "weights" else None,
        cancelled=lambda: stop_after is not None and len(seen) >= stop_after,
    )
    runner.unload()
    return seen


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / name)
    with pytest.raises(UnsafeWeights, match="safetensors") as refusal:
        load(tmp_path)
    assert name in refusal.value.message


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(UnsupportedModel, match=r"no \*\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [4, 100, 0.5, 0.999])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, kept: float) -> None:
    file = make_tiny_model(tmp_path) / SINGLE
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors .* damaged"):
        load(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    (make_tiny_model(tmp_path) / SINGLE).write_bytes(b"<html>not found</html>" * 50)
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changed", [torch.zeros(64, 32), torch.zeros(32, 64, 2), torch.zeros(64, 64), torch.zeros(32, 64, dtype=torch.int8)]
)
def test_a_tensor_that_changes_after_its_header_was_checked_is_not_computed_with(
    tmp_path: Path, changed: torch.Tensor
) -> None:
    file = make_tiny_model(tmp_path, dtype="bfloat16") / SINGLE
    name, weights = "model.layers.0.self_attn.k_proj.weight", load_file(file)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read(name)[0].shape == (32, 64)
    save_file({**weights, name: changed}, file)
    with pytest.raises(ModelLoadFailed, match=f"has changed while it was read: its tensor {name}"):
        Checkpoint({name: checkpoint.info(name)}).read(name)


def test_links_to_nothing_beside_an_adapter_keep_no_model_from_loading(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model).folder
    (adapter / "optimizer").symlink_to("nothing")
    spec = ModelSpec(path=model, name="tiny", device="cpu", lora=adapter)
    runner = ModelRunner.load(model, spec, report=lambda progress: None, cancelled=lambda: False)
    assert runner.parameters
    runner.unload()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / SINGLE
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadFailed, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / SINGLE
    save_file(load_file(file) | {"model.norm.weight": torch.ones(65)}, file)
    with pytest.raises(ModelLoadFailed, match=r"model\.norm\.weight .* is 65; config\.json makes it 64"):
        load(tmp_path)


def test_a_tensor_of_whole_numbers_is_refused_rather_than_read_as_weights(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / SINGLE
    save_file(load_file(file) | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(ModelLoadFailed, match=r"model\.norm\.weight .* I8"):
        load(tmp_path)


def test_a_shard_that_the_index_names_but_is_missing_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"1 of 2 weight files are missing, model-00002-of-00002\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../outside.safetensors"}}'])
def test_a_broken_index_is_refused_by_name(tmp_path: Path, index: str) -> None:
    make_tiny_model(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_progress_counts_every_byte_of_the_weights_once(tmp_path: Path, shards: int) -> None:
    make_tiny_model(tmp_path, shards=shards)
    total = sum(tensor.nbytes for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values())
    seen = load(tmp_path)
    assert [progress.done for progress in seen] == sorted({progress.done for progress in seen})
    assert {progress.total for progress in seen} == {total}
    assert seen[-1].done == total


def test_tensors_that_the_model_does_not_use_are_neither_read_nor_counted(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path, tie=True) / SINGLE
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.ones(320, 64), "rotary.inv_freq": torch.ones(8)}, file)
    assert load(tmp_path)[-1].total == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_a_load_stops_before_the_next_tensor_once_cancelled(tmp_path: Path, stop_after: int) -> None:
    make_tiny_model(tmp_path)
    with pytest.raises(LoadCancelled):
        load(tmp_path, stop_after=stop_after)


def test_an_index_that_lists_one_file_twice_reads_it_once(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / SINGLE
    weight_map = dict.fromkeys(load_file(file), SINGLE)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    seen = load(tmp_path)
    assert seen[-1].done == seen[-1].total
