"""Inspection of a model folder: what it has and whether it loads here, from config.json and safetensors headers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.backends.common import exllamav2_checkpoint, exllamav3_checkpoint
from engine.backends.common.config_values import MAX_LAYERS, MAX_TOKENS
from engine.backends.common.model_config import model_config_of, read_model_config
from engine.backends.common.quant_config import FP8_KINDS, FP8_SCALES, method_of_words, read_quantisation
from engine.config import BackendKind, quote_value
from engine.errors import UnsupportedModel
from engine.models.catalog import MAX_COUNT, ModelEntry, is_count
from engine.models.files import file_names, problem_with, read_json_object
from engine.models.gguf.file import GgufModel, is_gguf, model_name, present_files
from engine.models.gguf.header import GgufTensor
from engine.models.gguf.tensor_check import refuse_tensors
from engine.models.gguf.vocabulary import refuse_tokenizer
from engine.models.headers import TensorHeader, read_headers, weight_files
from engine.text.tokenizer_config import TokenizerFolder

# Which form of chat template a model folder has, recognised by the control tokens that its template writes.

CUSTOM_TEMPLATE = "own"
"""A template of a form that has no name here."""

_FORMS = (
    ("<|im_start|>", "ChatML"),
    ("<|start_header_id|>", "Llama 3"),
    ("<|header_start|>", "Llama 4"),
    ("<start_of_turn>", "Gemma"),
    ("<|START_OF_TURN_TOKEN|>", "Command R"),
    ("<|channel|>", "Harmony"),
    ("<｜Assistant｜>", "DeepSeek"),
    ("<<SYS>>", "Llama 2"),
    ("[INST]", "Mistral"),
    ("<|end|>", "Phi 3"),
    ("<|assistant|>", "Zephyr"),
    ("### Instruction", "Alpaca"),
    ("USER:", "Vicuna"),
)


def chat_template_form(path: Path) -> str:
    """ "ChatML", "Llama 3", ..., "own"; "" where the folder has no template. Raises UnsupportedModel for files that
    cannot be read."""
    return _form_among(TokenizerFolder.read(path).chat_templates())


def _form_among(templates: Mapping[str, str]) -> str:
    """The form of the template that is used; "" for none."""
    source = templates.get("default") or next(iter(templates.values()), "")
    return form_of(source) if source else ""


def form_of(source: str) -> str:
    """The form of a template's source."""
    return next((form for token, form in _FORMS if token in source), CUSTOM_TEMPLATE)


# How a model's weights are spread over its parts, from the headers of its files: embedding, each layer, head. Pure.

_LAYER_DIGITS = len(str(MAX_LAYERS))

_EMBEDDING = r"embed_tokens|embed_positions|wte|wpe|tok_embeddings|word_embeddings|embed_in"
_PART = re.compile(rf"(?:^|\.)(?:{_EMBEDDING}|(?:layers|layer|h|blocks)\.(\d+)|(lm_head|output|embed_out))\.")
_OF_MEDIA = ("vision", "visual", "image", "audio", "multi_modal", "mm_projector")
_WIDE = {"F64": 8, "F32": 4}
"""Bytes of an element that is kept in 2."""
_NOT_WEIGHTS = frozenset(
    (
        *("q_scale", "q_scale_max", "q_groups", "q_group_map", "q_perm", "q_invperm"),  # exl2
        *("suh", "svh", "su", "sv", "mcg", "mul1"),  # exl3
        *("qzeros", "scales", "g_idx"),  # gptq, awq
        *("weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "k_scale", "v_scale"),  # fp8
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),  # bitsandbytes
    )
)
_TILE_WEIGHTS = 256
PACKED_NAMES = (".q_weight", ".qweight", ".trellis")
"""Ends of the names of tensors that hold a layer's weights in words: exl2; gptq and awq; exl3."""
_HALF_BYTES_OF_WEIGHT = {"F64": 16, "F32": 8, "F16": 4, "BF16": 4, **dict.fromkeys((*FP8_KINDS, "I8"), 2), "U8": 1}
"""In the file, by dtype; bitsandbytes keeps two of 4 bits in a byte."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a model's tensors. elements: weights that they stand for, packed ones unpacked.

    packed_bytes: what they take as the files have them, floats wider than 16 bits cut to those.
    """

    elements: int = 0
    packed_bytes: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(elements=self.elements + other.elements, packed_bytes=self.packed_bytes + other.packed_bytes)


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """All parts. embedding: and what else comes before the layers; norm: and what else comes after them, but for the
    head.  packed_head: whether the head is quantised."""

    embedding: Part = Part()
    layers: tuple[Part, ...] = ()
    norm: Part = Part()
    head: Part = Part()
    packed_head: bool = False


def split_into_parts(tensors: Mapping[str, TensorHeader], layers: int, bits: float | None) -> ModelParts:
    """Give each tensor to its part; one of a layer beyond `layers` (guessing ahead, say) comes after them. Those for
    images and sound are of no part: no backend loads them.

    bits: of the quantised weights, as config.json has it.
    """
    elements_of, packed_of = [0] * (layers + 3), [0] * (layers + 3)
    packed_head = False
    text = "\n".join(tensors)
    has_media = any(word in text for word in _OF_MEDIA)
    for name, tensor in tensors.items():  # there may be a hundred thousand
        if has_media and any(word in name for word in _OF_MEDIA):
            continue
        place = _place(name, layers)
        begin, end = tensor.data_offsets
        elements_of[place] += _elements(name, tensor, tensors, bits)
        packed_of[place] += (end - begin) * 2 // _WIDE.get(tensor.dtype, 2)
        if place == _AT_HEAD:
            packed_head = packed_head or name.endswith(PACKED_NAMES) or tensor.dtype in FP8_KINDS
    parts = [Part(elements=each, packed_bytes=packed) for each, packed in zip(elements_of, packed_of, strict=True)]
    return ModelParts(
        embedding=parts[_AT_EMBEDDING],
        layers=tuple(parts[:layers]),
        norm=parts[_AT_NORM],
        head=parts[_AT_HEAD],
        packed_head=packed_head,
    )


_AT_EMBEDDING, _AT_NORM, _AT_HEAD = -3, -2, -1


def _place(name: str, layers: int) -> int:
    """The layer that a tensor belongs to, else one of the other parts."""
    found = _PART.search(name)
    if found is None:
        return _AT_NORM
    number, head = found.groups()
    if number is None:
        return _AT_HEAD if head else _AT_EMBEDDING
    if len(number) <= _LAYER_DIGITS and int(number) < layers:
        return int(number)
    return _AT_NORM


def _elements(name: str, tensor: TensorHeader, tensors: Mapping[str, TensorHeader], bits: float | None) -> int:
    """Weights of the model that a stored tensor stands for; packed ones stand for more than their elements."""
    kind = name[name.rfind(".") + 1 :]
    if kind == "q_weight":  # exl2: [packed rows, columns, padded to 32]; its permutation has one entry per row
        stem = name.removesuffix("q_weight")
        rows = tensors.get(f"{stem}q_invperm") or tensors.get(f"{stem}q_perm")
        return min(rows.elements * tensor.shape[-1], 8 * tensor.stored_bytes) if rows and tensor.shape else 0
    if kind == "trellis":  # exl3: [tiles of rows, tiles of columns, words of a tile], of 16 x 16 weights
        return min(_TILE_WEIGHTS * math.prod(tensor.shape[:2]), 8 * tensor.stored_bytes)
    if kind == "qweight":  # gptq and awq: 32-bit words full of values
        return int(tensor.elements * 32 / (bits or 4))
    if kind in _NOT_WEIGHTS or ".quant_state." in name:
        return 0
    half_bytes = _HALF_BYTES_OF_WEIGHT.get(tensor.dtype)
    if half_bytes is None:
        return 0
    begin, end = tensor.data_offsets
    return 2 * (end - begin) // half_bytes


_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS |= {"F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}
_MIN_BITS, _MAX_BITS = 0.1, 64
"""Per quantised weight. Methods go from 1 to 16; others would make more weights of a tensor than there can be."""

_READABLE = ("bfloat16", "float16", "float32")


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the headers. dtype: of most of the bytes that are plain numbers; packing: the method that their
    names betray, "" if none."""

    parameters: int = 0
    dtype: str = ""
    packing: str = ""


ChooseBackend = Callable[[str, Path], BackendKind]
"""The backend for weights of a quantisation, "" being none, at a path."""


def inspect(path: Path, choose: ChooseBackend = lambda quantisation, path: "torch") -> ModelEntry:
    """The model in a folder or GGUF file, named after it. Never raises: what is wrong is in the entry's `problem`, as
    the backend sees it that `choose` picks for its quantisation."""
    if is_gguf(path):
        return _inspect_gguf(path, choose("gguf", path))
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
    backend = choose(quantisation, path)
    with _noting(problems, path):
        if backend == "exllamav2":
            exllamav2_checkpoint.read_folder(path, tensors)
        elif backend == "exllamav3":
            exllamav3_checkpoint.read_folder(path, tensors)
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
        dtype=weights.dtype or quote_value(config.get("torch_dtype") or config.get("dtype") or ""),
        parameters=weights.parameters,
        weights_bytes=weights_bytes,
        context_tokens=context_tokens,
        backend=backend,
        problem=problems[0] if problems else "",
        chat_template=chat_template,
        model_type=_model_type(config),
    )


def _inspect_gguf(path: Path, backend: BackendKind) -> ModelEntry:
    config: Mapping[str, object] = {}
    tensors: Mapping[str, GgufTensor] = {}
    chat_template, context_tokens = "", 0
    problems: list[str] = []
    with _noting(problems, path):
        model = GgufModel(path)
        tensors = model.tensors
        config = model.config
        shape = model_config_of(config)
        context_tokens = shape.max_model_len
        chat_template = _form_among(TokenizerFolder(tokenizer=model.tokenizer_config()).chat_templates())
        if backend != "torch":
            raise UnsupportedModel(f"{backend} does not read GGUF; --backend auto or torch does")
        refuse_tensors(model, shape)
        refuse_tokenizer(model.header)
    stored: Counter[str] = Counter()
    for tensor in tensors.values():
        stored[tensor.format.name] += tensor.num_bytes
    most = max(stored, key=stored.__getitem__, default="")
    weights_bytes = min(MAX_COUNT, stored.total())
    if not tensors:
        with _noting(problems, path):
            weights_bytes = _stored_bytes(present_files(path))
    return ModelEntry(
        name=model_name(path),
        path=path,
        origin=str(path.parent),
        architecture=named_architecture(config),
        quantisation=f"gguf {most}" if most and most not in _FLOATS else "",
        dtype=_FLOATS.get(most, ""),
        parameters=min(MAX_COUNT, sum(math.prod(tensor.shape) for tensor in tensors.values())),
        weights_bytes=weights_bytes,
        context_tokens=context_tokens,
        backend=backend,
        problem=problems[0] if problems else "",
        chat_template=chat_template,
        model_type=_model_type(config),
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
    parameters, packing = 0, ""
    for name, tensor in tensors.items():
        parameters += _elements(name, tensor, tensors, bits)
        dtype = tensor.dtype
        if dtype in _FLOATS:
            plain_bytes[_FLOATS[dtype]] += tensor.stored_bytes
        if not packing and (dtype in FP8_KINDS or name.endswith(PACKED_NAMES)):
            packing = _packing(name, tensors)
    return _Weights(
        parameters=min(MAX_COUNT, parameters),
        dtype=next((dtype for dtype, _ in plain_bytes.most_common(1)), ""),
        packing=packing,
    )


def _packing(name: str, tensors: Mapping[str, TensorHeader]) -> str:
    """The method that a tensor gives away, "" for none."""
    stem, _, kind = name.rpartition(".")
    match kind:
        case "q_weight":
            return "exl2"
        case "trellis":
            return "exl3"
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
    return quote_value(names[0] if isinstance(names, list) and names else config.get("model_type") or "")


def _model_type(config: Mapping[str, object]) -> str:
    text_config = config.get("text_config")
    own = text_config.get("model_type") if isinstance(text_config, dict) else None
    return quote_value(own or config.get("model_type") or "")


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
        return quote_value(method)
    return f"{method} {bits:.1f} bpw" if method in ("exl2", "exl3") else f"{quote_value(method)} {bits:g}-bit"


def _method(config: Mapping[str, object]) -> object:
    """Return the method that config.json names, under its name here: compressed-tensors of 8-bit floats are fp8."""
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
