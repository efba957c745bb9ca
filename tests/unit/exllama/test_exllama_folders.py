"""Which folders and adapters the library is given, and which are refused and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError, UnsafeWeights, UnsupportedModel
from tests.fakes.exllama_loads import edit_config, load, write_adapter
from tests.fakes.exllama_model import GIB, FakeGpus
from tests.fakes.model_folders import write_model

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "names 2 architectures"),
        ({"architectures": []}, "names 0 architectures"),
        ({"architectures": ["NewForCausalLM"]}, "unsupported architecture: NewForCausalLM"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "Pixtral vision tower"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "GPTQ of 8 bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "marlin"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}, "group_size of 16"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 96}}, "powers of two from 32 on"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": False}},
            "zero points of their own",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "the weights are awq"),
        ({"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, "the weights are exl3; exllamav2 reads EXL2"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "RoPE scaling of type spiral"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "under rope_parameters"),
        ({"missing": "model.norm"}, "tiny is not complete: could not find model.norm"),
    ],
)
def test_a_folder_that_the_library_would_get_wrong_is_refused(
    tmp_path: Path, gpus: FakeGpus, changes: dict[str, Any], reason: str
) -> None:
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load(model, gpus)


def test_weights_of_a_dtype_that_cannot_be_read_are_refused_by_name(tmp_path: Path, gpus: FakeGpus) -> None:
    model = write_model(tmp_path / "model", {"model.norm.weight": ("I8", (4,))})
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is stored as I8"):
        load(model, gpus)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, gpus: FakeGpus) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        load(write_model(tmp_path / "model", tokenizer=False), gpus)


def test_four_bit_gptq_goes(folder: Path, gpus: FakeGpus) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    assert load(folder, gpus).info.dtype == "gptq 4-bit"


def test_an_adapter_is_applied_to_every_generator(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora")
    (adapter / "adapter_model.bin").write_bytes(b"")  # the library would take this one
    parts = load(folder, gpus, lora=adapter)
    for _ in range(2):
        (applied,) = parts.make_generator().loras
        assert applied.lora_path.endswith(".safetensors")
    parts.free()
    assert applied.unloaded


def test_a_pickled_adapter_is_refused(folder: Path, gpus: FakeGpus, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsafeWeights, match="pickle"):
        load(folder, gpus, lora=tmp_path / "lora")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 0}, "r in adapter_config"),
    ],
)
def test_an_adapter_that_would_not_be_honoured_in_full_is_refused(
    folder: Path, gpus: FakeGpus, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        load(folder, gpus, lora=write_adapter(tmp_path / "lora", **config))


@pytest.mark.parametrize("shape", [(8, 4), (8,), None])
def test_factors_that_share_no_rank_are_refused_before_native_code_multiplies_them(
    folder: Path, gpus: FakeGpus, tmp_path: Path, shape: tuple[int, ...] | None
) -> None:
    adapter = write_adapter(tmp_path / "lora")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    del tensors[name]
    save_file(tensors | ({name: torch.zeros(shape)} if shape else {}), file)
    with pytest.raises(UnsupportedModel, match=r"q_proj in adapter_model\.safetensors share no rank"):
        load(folder, gpus, lora=adapter)


def test_an_adapter_for_another_model_is_refused_and_leaves_nothing(
    folder: Path, gpus: FakeGpus, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", target="model.layers.7.self_attn.q_proj")
    with pytest.raises(UnsupportedModel, match=r"has no model\.layers\.7\.self_attn\.q_proj"):
        load(folder, gpus, lora=adapter)
    assert gpus.free_bytes(0) == 8 * GIB
