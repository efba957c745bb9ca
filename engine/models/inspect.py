"""What a model folder holds and whether it can be loaded here: from config.json and safetensors headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engine.backends.exllama.folder import read_folder
from engine.backends.torch.model_config import read_model_config
from engine.backends.torch.quant.declared import FP8_KINDS, FP8_SCALES, method_of_words, read_quantisation
from engine.config import BackendKind
from engine.errors import EngineError, UnsupportedModel
from engine.models.catalog import ModelEntry
from engine.models.files import read_json_object
from engine.models.headers import TensorHeader, read_header, weight_files
from engine.models.parts import elements
from engine.models.templates import chat_template_form

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS |= {"F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}
_READABLE = ("bfloat16", "float16", "float32")


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers say. dtype: of most of the bytes that are plain numbers; packing: the method that their names
    betray, "" if none."""

    file_bytes: int = 0
    parameters: int = 0
    dtype: str = ""
    packing: str = ""


ChooseBackend = Callable[[str], BackendKind]
"""The backend for weights of a quantisation, "" being none."""


def inspect(path: Path, choose: ChooseBackend = lambda quantisation: "torch") -> ModelEntry:
    """The model in a folder, named after it. Never raises: what is wrong is in the entry's `problem`, as the backend
    sees it that `choose` picks for its quantisation."""
    config: Mapping[str, object] = {}
    weights = _Weights()
    context_tokens = 0
    problems: list[str] = []
    try:
        config = read_json_object(path / "config.json")
        context_tokens = read_context(config)
    except EngineError as error:
        problems.append(error.message)
    try:
        weights = _read_weights(path, config)
    except EngineError as error:
        problems.append(error.message)
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    backend = choose(_quantisation(config, weights))
    try:
        if backend == "exllamav2":
            read_folder(path)
        else:
            context_tokens = read_model_config(path).max_model_len
            _refuse_unreadable(path, weights)
    except EngineError as error:
        problems.append(error.message)
    return ModelEntry(
        name=path.name,
        path=path,
        origin=str(path.parent),
        architecture=_architecture(config),
        quantisation=_quantisation(config, weights),
        dtype=weights.dtype or str(config.get("torch_dtype") or config.get("dtype") or ""),
        parameters=weights.parameters,
        weights_bytes=weights.file_bytes,
        context_tokens=context_tokens,
        backend=backend,
        problem=problems[0] if problems else "",
        chat_template=chat_template_form(path),
    )


def _read_weights(path: Path, config: Mapping[str, object]) -> _Weights:
    files = weight_files(path)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors.update(read_header(file))
    plain_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in _FLOATS:
            plain_bytes[_FLOATS[tensor.dtype]] += tensor.stored_bytes
    return _Weights(
        file_bytes=sum(file.stat().st_size for file in files),
        parameters=sum(elements(name, tensors, quantised_bits(config)) for name in tensors),
        dtype=next((dtype for dtype, _ in plain_bytes.most_common(1)), ""),
        packing=next((method for name in tensors if (method := _packing(name, tensors))), ""),
    )


def _packing(name: str, tensors: Mapping[str, TensorHeader]) -> str:
    """The method that a tensor gives away, "" for none."""
    stem, _, kind = name.rpartition(".")
    match kind:
        case "q_weight":
            return "exl2"
        case "qweight":
            return method_of_words(_width(tensors[name]), _width(tensors.get(f"{stem}.scales")))
        case "weight" if tensors[name].dtype in FP8_KINDS and any(f"{stem}.{scale}" in tensors for scale in FP8_SCALES):
            return "fp8"
        case _:
            return ""


def _width(tensor: TensorHeader | None) -> int:
    return tensor.shape[-1] if tensor is not None and tensor.shape else 0


def _refuse_unreadable(path: Path, weights: _Weights) -> None:
    """Raise UnsupportedModel for what config.json does not show: a rare dtype, no tokenizer."""
    if weights.dtype not in _READABLE and weights.packing != "fp8":
        raise UnsupportedModel(f"the weights are {weights.dtype or 'no floats'}; {', '.join(_READABLE)} can be read")
    if not (path / "tokenizer.json").is_file():
        raise UnsupportedModel("the folder has no tokenizer.json, which is needed to read and write text")


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0] if isinstance(names, list) and names else config.get("model_type") or "")


def read_context(config: Mapping[str, object]) -> int:
    """The length that config.json itself gives, for models whose config is not known any better."""
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            value = source.get(key)
            if isinstance(value, int):
                return value
    return 0


def _quantisation(config: Mapping[str, object], weights: _Weights) -> str:
    """ "exl2 5.0 bpw", "gptq 4-bit", "fp8", ..."""
    method = _method(config) or weights.packing
    bits = quantised_bits(config)
    if not method or bits is None:
        return str(method)
    return f"{method} {bits:.1f} bpw" if method == "exl2" else f"{method} {bits:g}-bit"


def _method(config: Mapping[str, object]) -> object:
    """What config.json names, as it is known here: compressed-tensors of 8-bit floats are fp8."""
    try:
        declared = read_quantisation(config)
    except UnsupportedModel:
        return _quantisation_config(config).get("quant_method")
    return declared.method if declared is not None else None


def quantised_bits(config: Mapping[str, object]) -> float | None:
    """Bits per quantised weight, where config.json says it."""
    quantisation = _quantisation_config(config)
    if quantisation.get("load_in_4bit") or quantisation.get("load_in_8bit"):
        return 4 if quantisation.get("load_in_4bit") else 8
    bits = quantisation.get("bits")
    return float(bits) if isinstance(bits, int | float) and bits > 0 else None


def _quantisation_config(config: Mapping[str, object]) -> Mapping[str, object]:
    value = config.get("quantization_config")
    return value if isinstance(value, dict) else {}
