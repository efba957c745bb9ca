"""What a model folder holds and whether it can be loaded here: from config.json and safetensors headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.backends.exllama.folder import read_folder
from engine.backends.torch.archs.reading import MAX_TOKENS
from engine.backends.torch.model_config import read_model_config
from engine.backends.torch.quant.declared import FP8_KINDS, FP8_SCALES, method_of_words, read_quantisation
from engine.config import BackendKind, quoted
from engine.errors import UnsupportedModel
from engine.models.catalog import MAX_COUNT, ModelEntry, is_count
from engine.models.files import file_names, problem_with, read_json_object
from engine.models.headers import TensorHeader, read_headers, weight_files
from engine.models.parts import elements
from engine.models.templates import chat_template_form

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS |= {"F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}
_MIN_BITS, _MAX_BITS = 0.1, 64
"""Per quantised weight. Methods go from 1 to 16; others would make more weights of a tensor than there can be."""

_READABLE = ("bfloat16", "float16", "float32")


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers say. dtype: of most of the bytes that are plain numbers; packing: the method that their names
    betray, "" if none."""

    parameters: int = 0
    dtype: str = ""
    packing: str = ""


ChooseBackend = Callable[[str], BackendKind]
"""The backend for weights of a quantisation, "" being none."""


def inspect(path: Path, choose: ChooseBackend = lambda quantisation: "torch") -> ModelEntry:
    """The model in a folder, named after it. Never raises: what is wrong is in the entry's `problem`, as the backend
    sees it that `choose` picks for its quantisation."""
    config: Mapping[str, object] = {}
    tensors: Mapping[str, TensorHeader] = {}
    files: Sequence[Path] = ()
    weights = _Weights()
    quantisation, chat_template, context_tokens, weights_bytes = "", "", 0, 0
    problems: list[str] = []
    with _noting(problems, path):
        config = read_json_object(path / "config.json")
        context_tokens = read_context(config)
    with _noting(problems, path):
        files = weight_files(path)
        tensors = read_headers(files)
        weights = _count_weights(tensors, quantised_bits(config))
    with _noting(problems, path):
        weights_bytes = _stored_bytes(files or _safetensors(path))
    with _noting(problems, path):
        quantisation = _quantisation(config, weights)
    backend = choose(quantisation)
    with _noting(problems, path):
        if backend == "exllamav2":
            read_folder(path, tensors)
        else:
            context_tokens = read_model_config(path).max_model_len
            _refuse_unreadable(path, weights)
    with _noting(problems, path):
        chat_template = chat_template_form(path)
    return ModelEntry(
        name=path.name,
        path=path,
        origin=str(path.parent),
        architecture=named_architecture(config),
        quantisation=quantisation,
        dtype=weights.dtype or quoted(config.get("torch_dtype") or config.get("dtype") or ""),
        parameters=weights.parameters,
        weights_bytes=weights_bytes,
        context_tokens=context_tokens,
        backend=backend,
        problem=problems[0] if problems else "",
        chat_template=chat_template,
    )


@contextmanager
def _noting(problems: list[str], path: Path) -> Iterator[None]:
    """Add what is raised within to `problems`, as a sentence."""
    try:
        yield
    except Exception as error:
        problems.append(problem_with(path, error))


def _safetensors(path: Path) -> list[Path]:
    return [path / name for name in file_names(path) if name.endswith(".safetensors")]


def _stored_bytes(files: Iterable[Path]) -> int:
    return min(MAX_COUNT, sum(file.stat().st_size for file in files))


def _count_weights(tensors: Mapping[str, TensorHeader], bits: float | None) -> _Weights:
    plain_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in _FLOATS:
            plain_bytes[_FLOATS[tensor.dtype]] += tensor.stored_bytes
    return _Weights(
        parameters=min(MAX_COUNT, sum(elements(name, tensors, bits) for name in tensors)),
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


def named_architecture(config: Mapping[str, object]) -> str:
    """The architecture that config.json names, else its kind of model; "" for neither."""
    names = config.get("architectures")
    return quoted(names[0] if isinstance(names, list) and names else config.get("model_type") or "")


def read_context(config: Mapping[str, object]) -> int:
    """The length that config.json itself gives, for models whose config is not known any better."""
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            value = source.get(key)
            if isinstance(value, int):
                return value if is_count(value) and value <= MAX_TOKENS else 0
    return 0


def _quantisation(config: Mapping[str, object], weights: _Weights) -> str:
    """ "exl2 5.0 bpw", "gptq 4-bit", "fp8", ..."""
    method = _method(config) or weights.packing
    bits = quantised_bits(config)
    if not method or bits is None:
        return quoted(method)
    return f"{method} {bits:.1f} bpw" if method == "exl2" else f"{quoted(method)} {bits:g}-bit"


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
    return float(bits) if isinstance(bits, int | float) and _MIN_BITS <= bits <= _MAX_BITS else None


def _quantisation_config(config: Mapping[str, object]) -> Mapping[str, object]:
    value = config.get("quantization_config")
    return value if isinstance(value, dict) else {}
