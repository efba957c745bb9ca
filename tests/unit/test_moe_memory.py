"""What is planned for a mixture of experts, from config.json and headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.backends.common.gguf_codes import SLAB_BYTES
from engine.backends.common.step_memory import graph_bytes, max_recorded_rows
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from engine.models.inspect import inspect
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import ModelCosts, Workload, costs_of
from tests.fakes.quantised_folders import make_twins
from tests.fakes.tiny_models import MIXTURES, make_tiny_model


def costs(folder: Path, **settings: Any) -> ModelCosts:
    spec = ModelSpec(path=folder, name="m", backend="torch", dtype="float32", **settings)
    return costs_of(read_facts(spec), spec, "cpu", Workload(), bfloat16=False)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_every_expert_of_a_folder_is_counted_and_nothing_is_wrong_with_it(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    entry = inspect(folder)
    assert (entry.problem, entry.architecture) == ("", architecture)
    assert entry.parameters * 4 == costs(folder).weights_bytes
    assert entry.parameters > 8 * 3 * 40 * 64


def test_a_folder_without_weights_is_counted_with_all_its_experts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "MixtralForCausalLM", num_hidden_layers=3)
    found = costs(folder)
    (folder / "model.safetensors").unlink()
    assert costs(folder).layer_bytes == found.layer_bytes
    assert len(set(found.layer_bytes)) == 1


def test_layers_without_experts_are_counted_as_such_in_a_folder_without_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Qwen3MoeForCausalLM", mlp_only_layers=[0])
    (folder / "model.safetensors").unlink()
    dense, sparse = costs(folder).layer_bytes
    assert sparse - dense == 4 * (8 * 64 + 8 * 3 * 64 * 40 - 3 * 64 * 128)


def test_more_experts_per_token_take_more_working_memory(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "MixtralForCausalLM", hidden_size=512)
    assert costs(folder, num_experts=8).working_bytes > costs(folder).working_bytes


def test_more_experts_per_token_than_there_are_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="num_experts is 9; this model has 8 experts"):
        costs(make_tiny_model(tmp_path, "MixtralForCausalLM"), num_experts=9)


def test_recorded_steps_are_counted_with_experts_in_codes_too(tmp_path: Path) -> None:
    twins = make_twins(tmp_path, "gptq", "MixtralForCausalLM", with_tokenizer=False, intermediate_size=64)

    def working(folder: Path, **settings: Any) -> int:
        spec = ModelSpec(path=folder, name="m", backend="torch", dtype="float16", **settings)
        return costs_of(read_facts(spec), spec, "cuda", Workload(), bfloat16=False).head_working_bytes

    workload, shape = Workload(), read_facts(ModelSpec(path=twins.plain, name="m", backend="torch")).shape
    rows = max_recorded_rows(workload.max_prompts, workload.step_tokens)
    recorded = graph_bytes(shape, rows, workload.max_prompts, 2, workload.page_tokens)
    assert working(twins.quantised) - working(twins.plain) == 2 * SLAB_BYTES
    assert working(twins.quantised) > recorded
