"""Quantised tensors are looked at before the library's native code goes by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.exllamav2.loading import refuse_malformed
from engine.errors import LoadCancelled, ModelLoadFailed
from tests.fakes.exl2_tensors import random_exl2
from tests.fakes.exllama_loads import load, models_of
from tests.fakes.exllama_model import FakeGpus
from tests.fakes.gptq_tensors import random_gptq
from tests.fakes.hostile_folders import header, tensor
from tests.fakes.quantised_folders import edit_weights, make_twins

pytestmark = pytest.mark.long

KEY = "model.layers.0.self_attn.q_proj"
LAYERS = {
    "exl2": random_exl2([(6, 32), (4, 32)], 64),
    "gptq": random_gptq(64, 64, 2, g_idx=[row % 2 for row in range(64)]),
}


def first(tensor: Tensor, value: int) -> Tensor:
    changed = tensor.clone()
    changed[0] = value
    return changed


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({f"{KEY}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def model_of(rows: int, columns: int, padding: int = 0) -> Any:
    """A model of the library's with one linear layer, whose outputs it pads."""
    linear = SimpleNamespace(key=KEY, in_features=rows, out_features=columns, padding=padding)
    return SimpleNamespace(modules=[SimpleNamespace(key="model.layers.0", submodules=[linear])], config=None)


NO_LAYERS = SimpleNamespace(modules=[], config=None)


def go_on() -> None:
    """Nobody cancels."""


@pytest.mark.parametrize(
    ("method", "part", "value", "problem"),
    [
        ("gptq", "g_idx", 2**31 - 1, "names groups outside the 2 that exist"),
        ("gptq", "g_idx", -1, "names groups outside the 2 that exist"),
        ("exl2", "q_groups", 0, "has values of 0 bits"),
        ("exl2", "q_invperm", 64, "is not a permutation of 64 rows"),
    ],
)
def test_values_that_native_code_would_write_by_are_refused_before_it_has_them(
    tmp_path: Path, method: str, part: str, value: int, problem: str
) -> None:
    tensors = LAYERS[method]
    refuse_malformed(written(tmp_path, tensors), model_of(64, 64), go_on)
    folder = written(tmp_path, tensors | {part: first(tensors[part], value)})
    with pytest.raises(ModelLoadFailed, match=problem):
        refuse_malformed(folder, model_of(64, 64), go_on)


def test_files_that_no_index_names_are_looked_at_too_as_the_library_reads_all_there_are(tmp_path: Path) -> None:
    folder = written(tmp_path, LAYERS["gptq"])
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model.safetensors"}}')
    refuse_malformed(folder, NO_LAYERS, go_on)
    (folder / "more.safetensors").write_bytes(header({"w": tensor("F16", (2, 2), (0, 1 << 12))}, bytes(1 << 12)))
    with pytest.raises(ModelLoadFailed, match=r"shape \[2, 2\] does not take 4096 bytes"):
        refuse_malformed(folder, NO_LAYERS, go_on)


def test_tensors_that_the_library_would_mix_up_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, LAYERS["exl2"])
    mapped = SimpleNamespace(tensor_file_map=dict.fromkeys(list(LAYERS["exl2"])[1:]))
    with pytest.raises(ModelLoadFailed, match="have tensors of the same name"):
        refuse_malformed(folder, SimpleNamespace(modules=[], config=mapped), go_on)
    save_file({f"{KEY}.q_groups": LAYERS["exl2"]["q_groups"]}, folder / "twice.safetensors")
    with pytest.raises(ModelLoadFailed, match="have tensors of the same name"):
        refuse_malformed(folder, NO_LAYERS, go_on)
    save_file({"other.q_groups": LAYERS["exl2"]["q_groups"]}, folder / "twice.safetensors")
    with pytest.raises(ModelLoadFailed, match="q_groups has no q_weight or qweight next to it"):
        refuse_malformed(folder, NO_LAYERS, go_on)


@pytest.mark.parametrize(("method", "part"), [("exl2", "q_scale"), ("gptq", "qzeros")])
def test_a_part_that_is_missing_is_named(tmp_path: Path, method: str, part: str) -> None:
    folder = written(tmp_path, {name: each for name, each in LAYERS[method].items() if name != part})
    with pytest.raises(ModelLoadFailed, match=f"lack the tensor {KEY}.{part}"):
        refuse_malformed(folder, NO_LAYERS, go_on)


def test_a_load_refuses_them_before_the_library_reads_a_tensor(tmp_path: Path, gpus: FakeGpus) -> None:
    folder = make_twins(tmp_path, "gptq").quantised
    made, library = models_of(gpus)
    load(folder, gpus, library=library)
    assert made.pop().calls
    edit_weights(folder, **{f"{KEY}.g_idx": torch.full((64,), 2**30, dtype=torch.int32)})
    with pytest.raises(ModelLoadFailed, match="g_idx names groups"):
        load(folder, gpus, library=library)
    assert not made.pop().calls


@pytest.mark.parametrize("method", LAYERS)
@pytest.mark.parametrize("shape", [(128, 64), (64, 128), (32, 64)])
def test_a_layer_of_another_shape_than_the_library_makes_room_for_is_refused(
    tmp_path: Path, method: str, shape: tuple[int, int]
) -> None:
    with pytest.raises(ModelLoadFailed, match=f"of 64 x 64; config.json makes it {shape[0]} x {shape[1]}"):
        refuse_malformed(written(tmp_path, LAYERS[method]), model_of(*shape), go_on)


def test_outputs_that_the_library_pads_and_layers_that_it_calls_otherwise_are_taken(tmp_path: Path) -> None:
    folder = written(tmp_path, random_gptq(64, 40, 2))
    refuse_malformed(folder, model_of(64, 64, padding=24), go_on)
    refuse_malformed(folder, NO_LAYERS, go_on)


@pytest.mark.parametrize(
    "tensors", [random_exl2([(8, 16), (4, 48)], 64), random_exl2([(4, 40)], 64), random_gptq(40, 64, 1)]
)
def test_rows_that_the_librarys_kernels_would_go_beyond_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ModelLoadFailed, match="exllamav2 takes a multiple of 32"):
        refuse_malformed(written(tmp_path, tensors), NO_LAYERS, go_on)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (random_gptq(64, 64, 4), "scales has 4 groups; exllamav2 takes 32 rows or more each"),
        (random_gptq(64, 64, 2, g_idx=[int(row > 20) for row in range(64)]), "g_idx has groups of several sizes"),
    ],
)
def test_groups_whose_scales_the_librarys_kernels_would_mix_up_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], problem: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=problem):
        refuse_malformed(written(tmp_path, tensors), NO_LAYERS, go_on)


def test_a_last_group_of_fewer_rows_is_taken(tmp_path: Path) -> None:
    for g_idx in (None, [row // 64 for row in range(96)]):
        refuse_malformed(written(tmp_path, random_gptq(96, 64, 2, g_idx=g_idx)), NO_LAYERS, go_on)


def test_the_look_ends_where_the_load_is_cancelled(tmp_path: Path) -> None:
    def cancel() -> None:
        raise LoadCancelled("the load was cancelled")

    with pytest.raises(LoadCancelled):
        refuse_malformed(written(tmp_path, LAYERS["gptq"]), model_of(64, 64), cancel)
