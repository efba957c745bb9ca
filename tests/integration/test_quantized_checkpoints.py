"""Folders of EXL2, EXL3, GPTQ, AWQ and FP8 weights answer exactly as the weights they stand for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends import torch_device
from engine.backends.base import BackendRequest, LoadProgress
from engine.backends.checkpoints.checkpoint import Checkpoint
from engine.backends.common.model_config import read_model_config
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights.decoder_loader import match_checkpoint
from engine.backends.torch.weights.reader import locate_weights
from engine.config import ModelSpec, SamplingParams
from engine.errors import InsufficientMemory, LoadCancelled, ModelLoadFailed
from engine.models.inspect import inspect
from tests.fakes import awq_tensors, exl2_tensors, gptq_tensors
from tests.fakes.oracle import ignore_progress, load_runner, never
from tests.fakes.quantised_folders import Twins, edit_config, edit_weights, make_twins

TOKENS = 16
WIDER_THAN_A_SLAB = 4136
PROMPT = [(17 * position) % 300 + 3 for position in range(20)]
Q_PROJ = "model.layers.0.self_attn.q_proj"

MODELS: dict[str, dict[str, Any]] = {
    "exl2-llama": {"method": "exl2"},
    "exl2-qwen2": {"method": "exl2", "architecture": "Qwen2ForCausalLM"},
    "exl2-padded": {
        "method": "exl2",
        "architecture": "Qwen2ForCausalLM",
        "vocab_size": 330,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 64,
    },
    "exl2-plain-head": {"method": "exl2", "plain_head": True, "num_hidden_layers": 1},
    "exl2-tied": {"method": "exl2", "tie": True, "plain_head": True, "num_hidden_layers": 1},
    "exl2-tied-with-a-head": {"method": "exl2", "tie": True, "num_hidden_layers": 1},
    "exl3-llama": {"method": "exl3"},
    "exl3-padded": {
        "method": "exl3",
        "architecture": "Qwen2ForCausalLM",
        "vocab_size": 330,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 96,
    },
    "exl3-plain-head": {"method": "exl3", "plain_head": True, "num_hidden_layers": 1},
    "exl3-tied-with-a-head": {"method": "exl3", "tie": True, "num_hidden_layers": 1},
    "gptq-llama": {"method": "gptq"},
    "gptq-qwen2": {"method": "gptq", "architecture": "Qwen2ForCausalLM"},
    "gptq-plain-head": {"method": "gptq", "plain_head": True, "num_hidden_layers": 1},
    "awq-llama": {"method": "awq", "num_hidden_layers": 1},
    "awq-qwen2-plain-head": {
        "method": "awq",
        "architecture": "Qwen2ForCausalLM",
        "plain_head": True,
        "num_hidden_layers": 1,
    },
    "fp8-llama": {"method": "fp8", "num_hidden_layers": 1},
    "fp8-qwen3-plain-head": {
        "method": "fp8",
        "architecture": "Qwen3ForCausalLM",
        "plain_head": True,
        "num_hidden_layers": 1,
    },
    "fp8-tied-with-a-head": {"method": "fp8", "tie": True, "num_hidden_layers": 1},
    "fp8-channel-qwen2": {"method": "fp8-channel", "architecture": "Qwen2ForCausalLM", "num_hidden_layers": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return make_twins(tmp_path_factory.mktemp(request.param), **MODELS[request.param])


@pytest.fixture(scope="module")
def exl2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twins(tmp_path_factory.mktemp("exl2"), "exl2", num_hidden_layers=1).quantised


@pytest.fixture(scope="module")
def exl3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without padding, so that its tensors show its parameters."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128, "vocab_size": 384, "num_hidden_layers": 1}
    return make_twins(tmp_path_factory.mktemp("exl3"), "exl3", **sizes).quantised


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twins(tmp_path_factory.mktemp("gptq"), "gptq", num_hidden_layers=1).quantised


@pytest.fixture(scope="module")
def awq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twins(tmp_path_factory.mktemp("awq"), "awq", num_hidden_layers=1).quantised


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twins(tmp_path_factory.mktemp("fp8"), "fp8", num_hidden_layers=1).quantised


@pytest.fixture(scope="module")
def fp8_channel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twins(tmp_path_factory.mktemp("channel"), "fp8-channel", num_hidden_layers=1).quantised


@pytest.fixture
def exl2(exl2_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(exl2_folder, tmp_path / "model")


@pytest.fixture
def exl3(exl3_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(exl3_folder, tmp_path / "model")


@pytest.fixture
def gptq(gptq_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(gptq_folder, tmp_path / "model")


@pytest.fixture
def awq(awq_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(awq_folder, tmp_path / "model")


@pytest.fixture
def fp8(fp8_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(fp8_folder, tmp_path / "model")


def logits(folder: Path, **spec: Any) -> torch.Tensor:
    return load_runner(folder, **spec).forward([ChunkInput(PROMPT, 0, [0, 1, 2], sample=True)])


def greedy_tokens(folder: Path) -> list[int]:
    backend = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", device="cpu", kv_cache_tokens=256)
    backend.load(spec, max_prompts=2, step_tokens=64, page_tokens=8, report=ignore_progress, cancelled=never)
    backend.submit(BackendRequest(id="r", prompt_ids=PROMPT, params=SamplingParams(temperature=0)))
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        tokens += [event.token_id for event in backend.step() if event.token_id is not None]
    backend.unload()
    return tokens


def weights_progress(folder: Path, *, stop_after: int | None = None) -> list[LoadProgress]:
    """The weights' progress of a load; cancelled once `stop_after` tensors were read."""
    seen: list[LoadProgress] = []
    ModelRunner.load(
        folder,
        ModelSpec(path=folder, name="tiny", dtype="float32", device="cpu"),
        report=lambda progress: seen.append(progress) if progress.phase == "weights" else None,
        cancelled=lambda: stop_after is not None and len(seen) >= stop_after,
    ).unload()
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_folder_gives_the_logits_of_its_dequantised_weights_exactly(twins: Twins, dtype: str) -> None:
    assert torch.equal(logits(twins.quantised, dtype=dtype), logits(twins.plain, dtype=dtype))


def test_a_quantised_folder_answers_with_the_tokens_of_its_dequantised_weights(twins: Twins) -> None:
    assert greedy_tokens(twins.quantised) == greedy_tokens(twins.plain)


def test_a_quantised_folder_has_the_parameters_of_its_plain_twin(twins: Twins) -> None:
    quantised, plain = load_runner(twins.quantised), load_runner(twins.plain)
    assert quantised.parameters == plain.parameters
    assert quantised.weights_bytes == plain.weights_bytes


def test_progress_counts_every_stored_byte_once(twins: Twins) -> None:
    total = sum(tensor.nbytes for tensor in load_file(twins.quantised / "model.safetensors").values())
    seen = weights_progress(twins.quantised)
    assert [progress.done for progress in seen] == sorted({progress.done for progress in seen})
    assert {progress.total for progress in seen} == {total}
    assert seen[-1].done == total


@pytest.mark.parametrize("stop_after", [0, 1, 5])
def test_a_load_stops_before_the_next_tensor_once_cancelled(exl2_folder: Path, stop_after: int) -> None:
    with pytest.raises(LoadCancelled):
        weights_progress(exl2_folder, stop_after=stop_after)


def test_memory_is_asked_for_by_the_size_of_the_expanded_weights(
    exl2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = (exl2_folder / "model.safetensors").stat().st_size
    expanded = load_runner(exl2_folder).weights_bytes
    assert 2 * stored < expanded
    monkeypatch.setattr(torch_device, "free_bytes", lambda device: 2 * stored)
    with pytest.raises(InsufficientMemory) as refusal:
        load_runner(exl2_folder)
    assert refusal.value.details["needed_bytes"] == expanded


def test_quantised_weights_are_float16_whatever_the_config_says_of_the_original(exl2: Path) -> None:
    edit_config(exl2, torch_dtype="bfloat16")
    config = match_checkpoint(read_model_config(exl2), Checkpoint.open(exl2))
    assert config.checkpoint_dtype == "float16"


def test_8_bit_floats_become_the_floats_that_the_config_names(fp8: Path) -> None:
    edit_config(fp8, torch_dtype="bfloat16")
    config = match_checkpoint(read_model_config(fp8), Checkpoint.open(fp8))
    assert config.checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize("folder", ["exl2_folder", "exl3_folder", "gptq_folder", "awq_folder", "fp8_channel_folder"])
def test_quantised_weights_are_known_without_a_word_in_the_config(
    folder: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    declared: Path = request.getfixturevalue(folder)
    silent = shutil.copytree(declared, tmp_path / "silent")
    edit_config(silent, quantization_config=None)
    assert torch.equal(logits(silent), logits(declared))


def test_zero_points_of_gptq_v2_are_read_as_they_are_stored(gptq: Path) -> None:
    """Stored zeros of 1..15 less one in the second format are the same zeros."""
    tensors = load_file(gptq / "model.safetensors")
    first = {name: tensor & 0x77777777 for name, tensor in tensors.items() if name.endswith(".qzeros")}
    edit_weights(gptq, **first)
    expected = logits(gptq)
    edit_weights(gptq, **{name: zeros + 0x11111111 for name, zeros in first.items()})
    edit_config(gptq, quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    assert torch.equal(logits(gptq), expected)


@pytest.mark.parametrize(
    ("folder", "declared", "mark", "found"),
    [
        ("exl2", "gptq", "q_weight", "exl2"),
        ("exl2", "exl3", "q_weight", "exl2"),
        ("exl3", "exl2", "trellis", "exl3"),
        ("gptq", "exl2", "qweight", "gptq"),
        ("gptq", "awq", "qweight", "gptq"),
        ("awq", "gptq", "qweight", "awq"),
        ("fp8", "awq", "weight", "fp8"),
    ],
)
def test_tensors_of_another_method_than_the_config_says_are_named(
    folder: str, declared: str, mark: str, found: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    edit_config(path, quantization_config={"quant_method": declared, "bits": 4})
    with pytest.raises(ModelLoadFailed, match=rf"lm_head\.{mark} is {found}; config\.json says .* {declared}"):
        logits(path)


def test_groups_that_contradict_the_configs_group_size_are_named(gptq: Path) -> None:
    edit_config(gptq, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16})
    with pytest.raises(ModelLoadFailed, match=r"lm_head\.scales has 2 groups; .* group_size of 16 makes 4"):
        logits(gptq)


def test_awq_groups_that_contradict_the_configs_group_size_are_named(awq: Path) -> None:
    edit_config(awq, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64})
    with pytest.raises(ModelLoadFailed, match=r"lm_head\.scales has 2 groups; .* group_size of 64 makes 1"):
        logits(awq)


def test_fp8_scales_that_contradict_the_configs_blocks_are_named(fp8: Path) -> None:
    edit_config(fp8, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelLoadFailed, match=r"lm_head\.weight_scale_inv is 7 x 2; its layer makes it 3 x 1$"):
        logits(fp8)


@pytest.mark.parametrize(
    ("folder", "part", "changed", "problem"),
    [
        ("exl2", "q_scale", None, "is missing"),
        ("exl2", "q_weight", torch.zeros(16, 96, dtype=torch.int32), "is 16 x 96; its layer makes it 16 x 64"),
        ("exl2", "q_invperm", torch.arange(96, dtype=torch.int32), "is 96; its layer makes it 64"),
        ("exl2", "q_groups", torch.tensor([8, 0, 7, 4, 2, 9], dtype=torch.int16), "is damaged: its group 1"),
        ("exl2", "q_groups", torch.zeros(6, dtype=torch.int32), "is stored as I32"),
        ("exl2", "bias", torch.ones(64).half(), "is not zero, and config.json gives its layer no bias"),
        ("exl3", "svh", None, "is missing"),
        ("exl3", "trellis", torch.zeros(8, 32, 144, dtype=torch.int16), "has tiles of 144 words, 9 bits per weight"),
        ("exl3", "trellis", torch.zeros(8, 16, 64, dtype=torch.int16), "is 8 x 16 x 64; its layer makes it 8 x "),
        ("exl3", "suh", torch.ones(64).half(), "is 64; its layer makes it 128"),
        ("exl3", "mcg", torch.tensor(1, dtype=torch.int32), "is 0x1; the codebook's multiplier is 0xcbac1fed"),
        ("exl3", "bias", torch.ones(512).half(), "is not zero, and config.json gives its layer no bias"),
        ("gptq", "qzeros", None, "is missing"),
        ("gptq", "qweight", torch.zeros(16, 64, dtype=torch.int32), "has 8-bit values"),
        ("gptq", "g_idx", torch.full((64,), 9, dtype=torch.int32), "names groups outside the 2"),
        ("gptq", "bias", torch.ones(64).half(), "is not zero, and config.json gives its layer no bias"),
        ("awq", "scales", None, "is missing"),
        ("awq", "qzeros", None, "is missing"),
        ("awq", "scales", torch.ones(2, 63).half(), "is 2 x 63; its layer makes it 2 x 64"),
        ("awq", "scales", torch.ones(2, 64, dtype=torch.int32), "is stored as I32; it must be F16"),
        ("awq", "qweight", torch.zeros(63, 8, dtype=torch.int32), "is 63 x 8; its layer makes it 64 x 8"),
        ("awq", "qzeros", torch.zeros(1, 8, dtype=torch.int32), "is 1 x 8; its layer makes it 2 x 8"),
        ("awq", "bias", torch.ones(64).half(), "is not zero, and config.json gives its layer no bias"),
        ("fp8", "weight_scale_inv", torch.ones(2, 1), "is 2 x 1; its layer makes it 2 x 2"),
        ("fp8", "weight_scale_inv", torch.ones(2, 2, dtype=torch.uint8), "is stored as U8; it must be F32"),
        ("fp8", "weight", torch.zeros(64, 32).to(torch.float8_e4m3fn), "is 64 x 32; its layer makes it 64 x 64"),
    ],
)
def test_a_malformed_tensor_of_a_layer_is_named(
    folder: str, part: str, changed: torch.Tensor | None, problem: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    edit_weights(path, **{f"{Q_PROJ}.{part}": changed})
    with pytest.raises(ModelLoadFailed) as refusal:
        logits(path)
    assert refusal.value.message.startswith(f"the quantised tensor {Q_PROJ}.{part} {problem}")


def make_phi3_twins(folder: Path) -> Twins:
    """A model whose fused layers exllamav3 writes in parts."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256, "head_dim": 128}
    twins = make_twins(folder, "exl3", "Phi3ForCausalLM", num_hidden_layers=1, intermediate_size=128, **sizes)
    file = twins.plain / "model.safetensors"
    weights = load_file(file)
    for fused, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
        stem = f"model.layers.0.{fused}".rpartition(".")[0]
        rows = [weights.pop(f"{stem}.{part}_proj.weight") for part in parts]
        weights[f"model.layers.0.{fused}_proj.weight"] = torch.cat(rows)
    save_file(weights, file)
    return twins


def test_parts_of_a_fused_layer_are_joined(tmp_path: Path) -> None:
    twins = make_phi3_twins(tmp_path)
    assert torch.equal(logits(twins.quantised), logits(twins.plain))
    assert inspect(twins.quantised).problem == ""


def test_parts_that_do_not_add_up_to_a_fused_layer_are_named(tmp_path: Path) -> None:
    folder = make_phi3_twins(tmp_path).quantised
    edit_weights(folder, **{f"{Q_PROJ}.trellis": torch.zeros(16, 8, 64, dtype=torch.int16)})
    with pytest.raises(ModelLoadFailed) as refusal:
        logits(folder)
    assert refusal.value.message == (
        f"the quantised tensor {Q_PROJ}.trellis has 128 outputs, and with model.layers.0.self_attn.k_proj and "
        "model.layers.0.self_attn.v_proj 384; model.layers.0.self_attn.qkv_proj has 512"
    )


def test_8_bit_floats_without_a_scale_are_named(fp8: Path) -> None:
    edit_weights(fp8, **{f"{Q_PROJ}.weight_scale_inv": None})
    with pytest.raises(ModelLoadFailed) as refusal:
        logits(fp8)
    assert refusal.value.message == (
        f"the quantised tensor {Q_PROJ}.weight is stored as F8_E4M3 without weight_scale_inv or weight_scale next to it"
    )


def test_a_norm_of_8_bit_floats_is_named(fp8: Path) -> None:
    edit_weights(fp8, **{"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})
    with pytest.raises(ModelLoadFailed, match=r"model\.norm\.weight .* stored as F8_E4M3; .* reads F32, F16, BF16"):
        logits(fp8)


def test_scales_of_activations_change_nothing(fp8: Path) -> None:
    expected = logits(fp8)
    edit_weights(fp8, **{f"{Q_PROJ}.input_scale": torch.tensor(0.5)})
    assert torch.equal(logits(fp8), expected)


def test_a_bias_of_zeros_that_the_model_does_not_have_changes_nothing(gptq: Path) -> None:
    expected = logits(gptq)
    edit_weights(gptq, **{f"{Q_PROJ}.bias": torch.zeros(64).half()})
    assert torch.equal(logits(gptq), expected)


@pytest.mark.parametrize("method", ["exl2", "gptq", "awq"])
def test_a_layer_wider_than_what_is_made_at_a_time_is_read_whole(method: str, tmp_path: Path) -> None:
    columns = WIDER_THAN_A_SLAB
    if method == "exl2":
        tensors = exl2_tensors.random_exl2([(4, 8)], columns)
        expected = exl2_tensors.dequantise_by_rules(tensors, columns)
    elif method == "awq":
        tensors = awq_tensors.random_awq(8, columns, 1)
        expected = awq_tensors.dequantise_by_rules(tensors)
    else:
        tensors = gptq_tensors.random_gptq(8, columns, 1)
        expected = gptq_tensors.dequantise_by_rules(tensors, [0] * 8)
    save_file({f"layer.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weights = locate_weights(Checkpoint.open(tmp_path), {"layer.weight": (columns, 8)}, None)
    assert torch.equal(weights["layer.weight"].read(torch.device("cpu")), expected.t())


def test_a_layer_that_is_neither_plain_nor_quantised_is_named(exl2: Path) -> None:
    edit_weights(exl2, **{f"{Q_PROJ}.q_weight": None})
    with pytest.raises(ModelLoadFailed, match=rf"lack the tensor {Q_PROJ}\.weight"):
        logits(exl2)


@pytest.mark.parametrize(
    ("folder", "label", "dtype"),
    [
        ("exl2_folder", "exl2 4.5 bpw", "float16"),
        ("exl3_folder", "exl3 4.0 bpw", "float16"),
        ("gptq_folder", "gptq 4-bit", "float16"),
        ("awq_folder", "awq 4-bit", "float16"),
        ("fp8_folder", "fp8", "float8_e4m3"),
        ("fp8_channel_folder", "fp8", "float8_e4m3"),
    ],
)
def test_a_quantised_folder_is_offered_as_one_that_can_be_loaded(
    folder: str, label: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    entry = inspect(path)
    assert (entry.problem, entry.quantisation, entry.dtype) == ("", label, dtype)
    assert entry.parameters == load_runner(path).parameters
