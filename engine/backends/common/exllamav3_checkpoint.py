"""Model folders that exllamav3 can load, checked before any GPU is touched. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config import quote_value
from engine.errors import UnsupportedModel
from engine.models.files import read_json_object, refuse_links
from engine.models.headers import TensorHeader, read_headers, weight_files

ARCHITECTURES = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DeciLMForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5_ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Glm5NextForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "HCXVisionV2ForCausalLM",
        "HYV3ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "IQuestCoderForCausalLM",
        "KimiLinearForCausalLM",
        "LagunaForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm2VlForConditionalGeneration",
        "LlamaForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "NemotronHForCausalLM",
        "NemotronH_Omni_Reasoning_V3",
        "Olmo3ForCausalLM",
        "OlmoHybridForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "SolarOpenForCausalLM",
        "Spark2_5ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)
"""Every architecture of exllamav3 1.6.5 but those of draft models; of one with images, the text model."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that the library can load. dtype: in words for people ("exl3 4.0 bpw")."""

    path: Path
    architecture: str
    dtype: str
    tensors: Mapping[str, TensorHeader]


def read_folder(path: Path, tensors: Mapping[str, TensorHeader] | None = None) -> ModelFolder:
    """The model in `path`. tensors: of its weight files, where they were read already.

    Raises UnsupportedModel, UnsafeWeights or ModelLoadFailed with what is wrong with it.
    """
    config = read_json_object(path / "config.json")
    if not config:
        raise UnsupportedModel(f"{path} has no config.json, so it is not a model folder")
    refuse_links(path)
    architecture, dtype = _architecture(config), _dtype(config)
    if not (path / "tokenizer.json").is_file():
        raise UnsupportedModel("the folder has no tokenizer.json, which is needed to read and write text")
    return ModelFolder(path, architecture, dtype, read_headers(weight_files(path)) if tensors is None else tensors)


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        count = len(names) if isinstance(names, list) else "no"
        raise UnsupportedModel(f"config.json names {count} architectures; it must name exactly one")
    name = names[0]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"unsupported architecture: {quote_value(name)} (exllamav3)", supported=", ".join(sorted(ARCHITECTURES))
        )
    return name


def _dtype(config: Mapping[str, object]) -> str:
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return "float16"
    method, bits = quote_value(quantisation.get("quant_method") or ""), quantisation.get("bits")
    if method != "exl3":
        raise UnsupportedModel(f"the weights are {method or 'quantised'}; exllamav3 reads EXL3 and floats")
    return f"exl3 {quote_value(bits)} bpw" if bits else method
