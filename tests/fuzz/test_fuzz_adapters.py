"""Any adapter folder is an entry, its factors or one sentence, at little cost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.common.model_config import ModelConfig, read_model_config
from engine.backends.exllamav2.load_plan import read_adapter
from engine.backends.torch.weights.adapters import locate_factors
from engine.config import AdapterSpec
from engine.errors import EngineError, UnsupportedModel
from engine.models.adapters import ModulePatterns, describe_adapter, version_of
from tests.fakes.adapters import make_adapter
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.mutations import changed, damaged
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

PATTERNS: dict[str, Any] = {
    "rank_pattern": {"q_proj": 4, r"layers\.\d+\.mlp\..*": 4, "^model.layers.1.": 4},
    "alpha_pattern": {"(q|v)_proj": 2.0, "model.layers.0.self_attn.q_proj": 3.0},
    "layers_to_transform": [0, 1],
}
PIECES = ("q_proj", "layers", ".", r"\.", "*", "+", "?", "(", ")", "|", "^", "$", r"\d", r"\w", "[0-9]", ".*", "(?:")
"""What patterns are made of."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), with_tokenizer=False)


@pytest.fixture(scope="module")
def config(model: Path) -> ModelConfig:
    return read_model_config(model)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("whole"), model, targets=("q_proj",), **PATTERNS).folder


def look(folder: Path, config: ModelConfig) -> None:
    """All that is made of an adapter before its factors are read, within bounds."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    with within_bounds(size):
        entry = describe_adapter(folder)
        version_of(AdapterSpec(name="x", path=folder))
    for text in (entry.problem, entry.base_model, *entry.targets):
        assert text.isprintable()
        assert len(text) < 1000
    assert "Error: " not in entry.problem, "it was foreseen"
    outcome(lambda: str(len(locate_factors(folder, config))), size, EngineError)
    outcome(lambda: str(read_adapter(folder)), size, EngineError)


@pytest.mark.parametrize("seed", range(60))
def test_a_config_with_other_values_is_an_entry_or_a_sentence(
    tmp_path: Path, whole: Path, config: ModelConfig, seed: int
) -> None:
    random = Random(seed)
    folder = shutil.copytree(whole, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), random, times=random.randrange(1, 4))))
    look(folder, config)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_of_other_bytes_are_an_entry_or_a_sentence(
    tmp_path: Path, whole: Path, config: ModelConfig, name: str, seed: int
) -> None:
    random = Random(f"{name}{seed}")
    folder = shutil.copytree(whole, tmp_path / "adapter")
    content = (folder / name).read_bytes()
    head = min(len(content), 8 + int.from_bytes(content[:8], "little"))
    (folder / name).write_bytes(damaged(content[:head], random, times=random.randrange(1, 4)) + content[head:])
    look(folder, config)


@pytest.mark.parametrize("seed", range(30))
def test_tensors_of_other_names_and_shapes_are_an_entry_or_a_sentence(
    tmp_path: Path, whole: Path, config: ModelConfig, seed: int
) -> None:
    random = Random(seed)
    folder = shutil.copytree(whole, tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(changed(json.loads(content[8:end]), random, times=random.randrange(1, 3))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    look(folder, config)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), name=st.text("q_projlayers.0", max_size=60))
def test_any_pattern_is_refused_or_matches_as_pythons_engine_has_it(pieces: list[str], name: str) -> None:
    pattern = "".join(pieces)
    if re.fullmatch(r"\^?([\w-]|\\?\.)+\$?", pattern):
        return  # a name, whose dots are dots
    try:
        with within_bounds():
            found = ModulePatterns({pattern: 1}).value_of(name, 0)
    except UnsupportedModel:
        return
    if sum(piece in ("*", "+", ".*") for piece in pieces) <= 2:  # Python's engine may take for ever
        assert found == (re.fullmatch(rf"(.*\.)?({pattern})", name) is not None)
