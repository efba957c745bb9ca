"""Model folders that exllamav2 can load, checked before any GPU is touched. No torch here."""

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
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DbrxForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmoeForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "IndexForCausalLM",
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "MiniCPMForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
        "YiForCausalLM",
    }
)
"""Every architecture of exllamav2 0.3.2. It takes any other for a Llama, with a warning, and computes nonsense."""

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "su", "longrope", "yarn", "llama3", "mrope"})
_MAX_THETA = 1e12
"""A thousand times the largest RoPE base of a published model."""

MIN_GROUP_ROWS = 32
"""Input rows that share a scale of GPTQ weights, min: the kernels look for the next scale once in as many."""

_GPTQ_FORMATS = frozenset({"gptq", "gptq_v2"})
_DTYPES = frozenset({"I32", "I16", "F16", "BF16", "F32"})
_WEIGHT_KINDS = frozenset({"weight", "bias", "q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm"})
_WEIGHT_KINDS |= {"qweight", "qzeros", "scales", "g_idx"}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that the library can load. quantisation: "exl2", "gptq" or "" for plain numbers.

    dtype: in words for people ("exl2 4.65 bpw").  rope_theta: where config.json says it in a place that the library
    does not read.
    """

    path: Path
    architecture: str
    quantisation: str
    dtype: str
    rope_theta: float | None
    tensors: Mapping[str, TensorHeader]


def read_folder(path: Path, tensors: Mapping[str, TensorHeader] | None = None) -> ModelFolder:
    """The model in `path`. tensors: of its weight files, where they were read already.

    Raises UnsupportedModel, UnsafeWeights or ModelLoadFailed with what is wrong with it.
    """
    config = read_json_object(path / "config.json")
    if not config:
        raise UnsupportedModel(f"{path} has no config.json, so it is not a model folder")
    refuse_links(path)
    architecture = _architecture(config)
    quantisation, dtype = _quantisation(config)
    theta = _rope_theta(config)
    if not (path / "tokenizer.json").is_file():
        raise UnsupportedModel("the folder has no tokenizer.json, which is needed to read and write text")
    tensors = read_headers(weight_files(path)) if tensors is None else tensors
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] in _WEIGHT_KINDS and tensor.dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{quote_value(name)} is stored as {tensor.dtype}; exllamav2 reads {', '.join(sorted(_DTYPES))}"
            )
    return ModelFolder(path, architecture, quantisation, dtype, theta, tensors)


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        count = len(names) if isinstance(names, list) else "no"
        raise UnsupportedModel(f"config.json names {count} architectures; it must name exactly one")
    name = names[0]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"unsupported architecture: {quote_value(name)} (exllamav2)", supported=", ".join(sorted(ARCHITECTURES))
        )
    vision = config.get("vision_config")
    if name == "LlavaForConditionalGeneration" and not (
        isinstance(vision, dict) and vision.get("model_type") == "pixtral"
    ):
        raise UnsupportedModel(f"exllamav2 supports {name} with a Pixtral vision tower only")
    return name


def _quantisation(config: Mapping[str, object]) -> tuple[str, str]:
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        return "", "float16"
    method, bits = quote_value(quantisation.get("quant_method") or ""), quantisation.get("bits")
    if method == "exl2":
        return method, f"exl2 {quote_value(bits)} bpw" if bits else method
    if method != "gptq":
        raise UnsupportedModel(f"the weights are {method or 'quantised'}; exllamav2 reads EXL2, 4-bit GPTQ and floats")
    if bits != 4:
        raise UnsupportedModel(f"the weights are GPTQ of {quote_value(bits)} bits; exllamav2 reads GPTQ of 4 bits only")
    layout = quantisation.get("checkpoint_format") or "gptq"
    if not isinstance(layout, str) or layout not in _GPTQ_FORMATS:
        raise UnsupportedModel(
            f"the weights are GPTQ packed as {quote_value(layout)}; exllamav2 reads gptq and gptq_v2"
        )
    if layout == "gptq_v2" and quantisation.get("sym", True) is not True:
        raise UnsupportedModel(
            "the weights are GPTQ packed as gptq_v2 with zero points of their own, of which exllamav2 misreads those "
            "that are 0; --backend torch reads them"
        )
    size = quantisation.get("group_size")
    if size not in (None, -1) and not (isinstance(size, int) and size >= MIN_GROUP_ROWS and size & (size - 1) == 0):
        raise UnsupportedModel(
            f"the weights are GPTQ with a group_size of {quote_value(size)}; exllamav2 reads powers of two from "
            f"{MIN_GROUP_ROWS} on, and -1"
        )
    return method, "gptq 4-bit"


def _rope_theta(config: Mapping[str, object]) -> float | None:
    """The RoPE base where it stands under "rope_parameters" alone (transformers 5), which the library overlooks.

    Raises UnsupportedModel for a RoPE that the library would overlook too.
    """
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("type") or scaling.get("rope_type") or "default"
        if not isinstance(kind, str) or kind not in _ROPE_TYPES:
            raise UnsupportedModel(f"exllamav2 does not support RoPE scaling of type {quote_value(kind)}")
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" in config:
        return None
    kind = parameters.get("rope_type") or "default"
    theta = parameters.get("rope_theta")
    if kind != "default" or not isinstance(theta, int | float) or not 0 < theta <= _MAX_THETA:
        raise UnsupportedModel(
            f"config.json keeps its RoPE ({quote_value(kind)}) under rope_parameters, where exllamav2 does not "
            "look; write it as rope_theta and rope_scaling"
        )
    return float(theta)
