"""Any JSON in a model folder's files is a row, a plan and an answer, or one sentence, at little cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from engine.backends.common.families import architectures
from engine.backends.common.model_config import read_model_config
from engine.backends.common.torch_load_settings import apply_settings
from engine.config import BackendName, ModelSpec
from engine.devices import simulated_readings
from engine.errors import EngineError
from engine.models.headers import weight_files
from engine.models.inspect import inspect
from engine.placement.estimate import estimate
from engine.placement.model_facts import read_facts
from engine.placement.model_memory import Workload
from engine.text.tokenizer_config import TokenizerFolder
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.model_folders import write_model
from tests.fakes.mutations import changed, damaged
from tests.fakes.tiny_models import make_tiny_model, tiny_config

pytestmark = pytest.mark.long

SEEDS = 30
MORE: dict[str, Any] = {
    "sliding_window": 64,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 30.0,
    "logits_scaling": 8.0,
    "embedding_multiplier": 2.0,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
"""Keys that some of the architectures read."""

QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
    {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "group_size": 64},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "exl2", "bits": 4.5},
    {"quant_method": "exl3", "bits": 3.5, "head_bits": 6, "codebook": "mcg"},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "block"}}},
    },
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole"), shards=2)


def look(folder: Path) -> None:
    """All that is made of a folder before it is loaded, within bounds."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    backends: tuple[BackendName, ...] = ("torch", "exllamav2")
    for backend in backends:
        with within_bounds(size):
            entry = inspect(folder, lambda quantisation, backend=backend: backend)
        assert entry.problem.isprintable()
        assert len(entry.problem) < 1000
        assert "Error: " not in entry.problem, "it was foreseen"
        msgspec.json.encode(entry, enc_hook=str)
        spec = ModelSpec(path=folder, name="m", backend=backend, weights="int8" if backend == "torch" else "auto")
        outcome(lambda spec=spec: planned(spec), size, EngineError)
    outcome(lambda: str(apply_settings(read_model_config(folder), ModelSpec(path=folder, name="m"))), size, EngineError)
    outcome(lambda: str(weight_files(folder)), size, EngineError)
    outcome(lambda: answered(folder), size, EngineError)


def planned(spec: ModelSpec) -> str:
    found = estimate(read_facts(spec), simulated_readings((8.0,)), spec, workers=2, workload=Workload())
    msgspec.msgpack.encode(found)  # no number is beyond what others can be told
    return found.verdict


def answered(folder: Path) -> str:
    read = TokenizerFolder.read(folder)
    ids = (read.bos_token_id(len), read.eos_token_ids(len))
    told = (ids, read.generation_defaults().as_params(), read.special_tokens(), read.chat_templates())
    return str(len(msgspec.msgpack.encode(told)))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "any"])
def test_a_config_with_other_values_is_a_row_and_a_plan_or_a_sentence(
    tmp_path: Path, architecture: str, seed: int
) -> None:
    random = Random(f"{architecture}{seed}")
    name = random.choice(list(architectures())) if architecture == "any" else architecture
    config = tiny_config(name) | dict(random.sample(sorted(MORE.items()), random.randrange(len(MORE))))
    if random.random() < 0.3:
        config["quantization_config"] = random.choice(QUANTISED)
    if random.random() < 0.2:
        config = {"architectures": [name], "text_config": config}
    folder = write_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(changed(config, random, times=random.randrange(1, 6))))
    if random.random() < 0.5:
        (folder / "model.safetensors").unlink()
    look(folder)


FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
Change = Callable[[bytes, Random], bytes]


def other_values(content: bytes, random: Random) -> bytes:
    return json.dumps(changed(json.loads(content), random, times=random.randrange(1, 4))).encode()


def other_bytes(content: bytes, random: Random) -> bytes:
    return damaged(content, random, times=random.randrange(1, 4))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("change", [other_values, other_bytes])
@pytest.mark.parametrize("name", FILES)
def test_any_file_of_a_real_folder_may_be_another(
    tiny: Path, tmp_path: Path, name: str, change: Change, seed: int
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / name).write_bytes(change((folder / name).read_bytes(), Random(f"{name}{seed}")))
    look(folder)
