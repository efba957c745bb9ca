"""Adapter folders: found, described, and refused in one sentence where they hold what would not be honoured."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.common.model_config import read_model_config
from engine.backends.torch.weights.adapters import locate_factors
from engine.config import AdapterSpec
from engine.errors import EngineError, InvalidRequest, UnsafeWeights, UnsupportedModel
from engine.models.adapters import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    adapter_file,
    describe_adapter,
    read_adapter_config,
    version_of,
)
from engine.models.discover import find_folders
from tests.fakes.adapters import make_adapter, write_adapter_config
from tests.fakes.tiny_models import make_tiny_model

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), with_tokenizer=False)


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model).folder


def locate(model: Path, folder: Path, scale: float = 1.0) -> dict[str, Any]:
    return dict(locate_factors(folder, read_model_config(model), scale))


def config(**changes: Any) -> Damage:
    return lambda folder: write_adapter_config(folder, **{"r": 4, "lora_alpha": 8} | changes)


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return damage


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def extra(name: str, *shape: int) -> Damage:
    return tensors(lambda found: found.update({name: torch.zeros(shape)}))


def cut_short(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


BAD: dict[str, tuple[Damage, str]] = {
    "dora": (config(use_dora=True), "is a DoRA adapter (use_dora)"),
    "whole-modules": (config(modules_to_save=["lm_head"]), "has modules of its own (modules_to_save)"),
    "biases": (config(bias="lora_only"), "biases (bias is lora_only)"),
    "other-kind": (config(peft_type="IA3"), "is of the kind IA3"),
    "pissa": (config(init_lora_weights="pissa_niter_4"), "changed base weights (init_lora_weights is pissa_niter_4)"),
    "no-rank": (config(r=0), "`$.r`"),
    "alpha-of-text": (config(lora_alpha="8"), "`$.lora_alpha`"),
    "bad-pattern": (config(rank_pattern={"(": 2}), "an invalid pattern"),
    "no-config": (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "broken-config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "no-weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "pickle": (pickled, "adapter_model.bin in"),
    "cut-short": (cut_short, "is truncated or damaged"),
    "empty": (tensors(dict.clear), "holds no LoRA factors"),
    "half": (tensors(lambda found: found.pop(A)), "self_attn.q_proj lacks its lora_A"),
    "embedding": (
        extra("base_model.model.model.embed_tokens.lora_embedding_A", 4, 320),
        "embed_tokens.lora_embedding_A in adapter_model.safetensors is not a plain LoRA factor",
    ),
    "magnitude": (extra(A.replace("lora_A", "lora_magnitude_vector"), 64), "is not a plain LoRA factor"),
    "integers": (
        tensors(lambda found: found.update({A: torch.zeros(4, 64, dtype=torch.int8)})),
        "is stored as I8",
    ),
    "no-common-rank": (tensors(lambda found: found.update({A: torch.zeros(3, 64)})), "[3, 64] and [64, 4]"),
}
MISFITS: dict[str, tuple[Damage, str]] = {
    "head": (
        tensors(
            lambda found: found.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(320, 4),
                }
            )
        ),
        "changes lm_head; in this model, the projections of attention and MLP in 2 layers",
    ),
    "rank": (config(r=8), "has rank 4; its config makes it 8"),
    "layers": (config(layers_to_transform=[1]), "layers.0.mlp.down_proj, which layers_to_transform leaves out"),
}


@pytest.mark.parametrize(("damage", "sentence"), BAD.values(), ids=BAD)
def test_what_would_not_be_honoured_is_refused_in_one_sentence_and_shown_with_the_folder(
    model: Path, adapter: Path, damage: Damage, sentence: str
) -> None:
    damage(adapter)
    with pytest.raises(EngineError) as refused:
        locate(model, adapter)
    assert sentence in refused.value.message
    assert "\n" not in refused.value.message
    assert describe_adapter(adapter).problem == refused.value.message


@pytest.mark.parametrize(("damage", "sentence"), MISFITS.values(), ids=MISFITS)
def test_an_adapter_that_is_not_for_this_model_is_refused_with_the_place(
    model: Path, adapter: Path, damage: Damage, sentence: str
) -> None:
    damage(adapter)
    with pytest.raises(UnsupportedModel) as refused:
        locate(model, adapter)
    assert sentence in refused.value.message
    assert describe_adapter(adapter).problem == ""


def test_a_pickle_is_refused_as_unsafe(adapter: Path) -> None:
    pickled(adapter)
    with pytest.raises(UnsafeWeights):
        adapter_file(adapter)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_is_refused(model: Path, adapter: Path, scale: float) -> None:
    with pytest.raises(InvalidRequest, match="scale"):
        locate(model, adapter, scale)


def test_alpha_over_rank_is_the_scale_and_over_its_root_when_rank_stabilised() -> None:
    plain = AdapterConfig(rank=16, alpha=32)
    assert plain.scale_of("any") == 2.0
    assert AdapterConfig(rank=16, alpha=32, rank_stabilised=True).scale_of("any") == 8.0
    patterned = AdapterConfig(rank=16, alpha=32, rank_pattern={"q_proj": 4}, alpha_pattern={r"layers\.1\..*": 8})
    assert patterned.scale_of("model.layers.0.self_attn.q_proj") == 8.0
    assert patterned.scale_of("model.layers.1.self_attn.q_proj") == 2.0
    assert patterned.scale_of("model.layers.1.self_attn.not_q_proj") == 0.5


def test_what_peft_leaves_out_has_pefts_defaults(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    read = read_adapter_config(adapter)
    assert (read.rank, read.alpha, read.rank_stabilised) == (8, 8.0, False)


def test_a_folder_is_described_by_what_it_holds(model: Path, tmp_path: Path) -> None:
    folder = make_adapter(
        tmp_path / "mine",
        model,
        targets=("q_proj", "up_proj"),
        rank_of=lambda module: 6 if module.endswith("up_proj") else 4,
        rank_pattern={"up_proj": 6},
        base_model_name_or_path="org/base",
    ).folder
    found = describe_adapter(folder)
    assert (found.rank, found.base_model, found.problem) == (6, "org/base", "")
    assert found.targets == ("q_proj", "up_proj")
    assert found.weights_bytes == (folder / "adapter_model.safetensors").stat().st_size


def test_adapters_are_found_as_models_are_under_unique_names(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--org--style" / "snapshots" / ("a" * 40)
    for folder in (tmp_path / "one" / "style", tmp_path / "one" / "org" / "tone", tmp_path / "two" / "style", snapshot):
        make_adapter(folder, model)
    make_tiny_model(tmp_path / "one" / "model", with_tokenizer=False)
    found = find_folders([tmp_path / "one", tmp_path / "two"], CONFIG)
    assert [entry.name for entry in found] == ["org/tone", "style", "style (two)", "org/style"]
    assert found[-1].path == snapshot
    assert all(describe_adapter(entry.path).problem == "" for entry in found)
    assert find_folders([tmp_path / "nowhere"], CONFIG, hub_cache=False) == []


def test_other_weights_in_the_same_folder_are_another_version(model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "it", model).folder
    first = version_of(AdapterSpec(name="it", path=folder))
    assert version_of(AdapterSpec(name="it", path=folder / ".." / "it")) == first
    assert version_of(AdapterSpec(name="it", path=folder, scale=0.5)) != first
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert version_of(AdapterSpec(name="other", path=copy)) == first
    stat = (folder / WEIGHTS).stat()
    other = make_adapter(tmp_path / "it", model, seed=9).folder / WEIGHTS
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert version_of(AdapterSpec(name="it", path=folder)) != first
