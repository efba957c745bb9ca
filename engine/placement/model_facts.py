"""Facts about a model folder that decide its memory: its shape, and its weights by part. No tensor is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.backends.common.config_values import MAX_LAYERS, MAX_SIZE, refuse_more
from engine.backends.common.families import architectures
from engine.backends.common.families.base import Traits, full_attention
from engine.backends.common.families.experts import mixture_elements
from engine.backends.common.gguf_codes import CodedSizes, CodedTensors, triton_problem
from engine.backends.common.model_config import CheckpointDtype, ModelConfig, model_config_of, read_model_config
from engine.backends.common.native_kernels import kernels_available
from engine.backends.common.packed_codes import packed_codes
from engine.backends.common.rope_config import RopeConfig
from engine.backends.common.tensor_shapes import language_model_name
from engine.config import BackendKind, ModelSpec, quote_value
from engine.errors import UnsafeWeights, UnsupportedModel
from engine.models.adapters import describe_adapter
from engine.models.files import file_names, is_file, is_folder, problem_with, read_json_object
from engine.models.gguf.file import GgufModel, is_gguf
from engine.models.gguf.tensor_check import refuse_tensors
from engine.models.headers import TensorHeader, read_headers, weight_files
from engine.models.inspect import (
    PACKED_NAMES,
    ModelParts,
    Part,
    named_architecture,
    quantised_bits,
    read_context,
    split_into_parts,
)
from engine.worker_process.factory import resolve_backend

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES: tuple[CheckpointDtype, ...] = ("bfloat16", "float16", "float32")
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "inner": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
}
"""What config.json calls a size, by the model's maker."""

_MAX_NUMBERS = 2**54
"""Weights of a model, or numbers of a context: ten thousand times the largest."""

_COUNTED = (*_NAMES["layers"], "num_local_experts", "num_experts", "n_routed_experts")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder and what else its spec loads.

    shape: also of architectures that no backend here knows, as far as config.json has it.  tied: the head is the
    embedding.  stamp: changes when the weight files do.  draft: the model that guesses ahead.
    adapter_bytes: of the LoRA adapter that is loaded with it.  codes, cuda_codes: what this machine's CPU and its GPUs
    compute from as the files have it; None for nothing.
    """

    path: Path
    backend: BackendKind
    shape: ModelConfig
    parts: ModelParts
    stored_dtype: CheckpointDtype
    tied: bool = False
    stamp: str = ""
    draft: ModelFacts | None = None
    adapter_bytes: int = 0
    codes: CodedSizes | None = None
    cuda_codes: CodedSizes | None = None

    def decoded_on_cuda(self) -> ModelFacts:
        """Return the facts for GPUs whose kernels compute from no codes."""
        draft = None if self.draft is None else self.draft.decoded_on_cuda()
        return msgspec.structs.replace(self, cuda_codes=None, draft=draft)


def read_facts(spec: ModelSpec) -> ModelFacts:
    """The facts of the folders that `spec` names; blocks for some milliseconds.

    A folder without weight files is taken as config.json describes it. Raises UnsupportedModel for one that is no
    model or cannot be read, UnsafeWeights for pickles, ModelLoadFailed for damaged or missing files.
    """
    facts = _facts_of(spec.path, resolve_backend(spec))
    draft = _facts_of(spec.draft_model, facts.backend) if spec.draft_model is not None else None
    adapter = 0 if spec.lora is None else describe_adapter(spec.lora).weights_bytes
    return msgspec.structs.replace(facts, draft=draft, adapter_bytes=adapter)


def _facts_of(folder: Path, backend: BackendKind) -> ModelFacts:
    try:
        return _read_folder(folder, backend)
    except OSError as error:
        raise UnsupportedModel(problem_with(folder, error)) from error


def _read_gguf(path: Path, backend: BackendKind) -> ModelFacts:
    model = GgufModel(path)
    shape, pieces = model_config_of(model.config), model.pieces
    floats = {
        name: TensorHeader(dtype="F16", shape=piece.shape, data_offsets=(0, 2 * math.prod(piece.shape)))
        for name, piece in pieces.items()
    }
    parts = split_into_parts(floats, shape.layers, None)
    _refuse_beyond_machines(path, shape, parts)
    refuse_tensors(model, shape)
    coded, on_cuda = CodedTensors.of(pieces), CodedTensors.of(pieces, "cuda")
    tied = not parts.head.elements
    return ModelFacts(
        path=path,
        backend=backend,
        shape=shape,
        parts=parts,
        stored_dtype=shape.checkpoint_dtype,
        tied=tied,
        stamp=_stamp([header.file for header in model.headers]),
        codes=coded.sizes(shape, tied=tied) if coded and kernels_available() else None,
        cuda_codes=on_cuda.sizes(shape, tied=tied) if on_cuda and not triton_problem() else None,
    )


def _read_folder(folder: Path, backend: BackendKind) -> ModelFacts:
    if is_gguf(folder):
        return _read_gguf(folder, backend)
    config = _read_config(folder)
    files = weight_files(folder) if any(".safetensors" in name for name in file_names(folder)) else []
    tensors = read_headers(files)
    shape = _shape(folder, config, tensors)
    parts = split_into_parts(tensors, shape.layers, quantised_bits(config)) if tensors else _expected_parts(shape)
    _refuse_beyond_machines(folder, shape, parts)
    packed = any(name.endswith(PACKED_NAMES) for name in tensors)
    tied = not parts.head.elements or (shape.tie_embeddings and not parts.packed_head)
    return ModelFacts(
        path=folder,
        backend=backend,
        shape=shape,
        parts=parts,
        stored_dtype="float16" if packed else shape.checkpoint_dtype,
        tied=tied,
        stamp=_stamp(files),
        cuda_codes=_packed_sizes(tensors, shape, tied=tied) if backend == "torch" else None,
    )


def _packed_sizes(tensors: Mapping[str, TensorHeader], shape: ModelConfig, *, tied: bool) -> CodedSizes | None:
    """Sizes of quantised weights that CUDA computes from as the files have them."""
    if shape.architecture not in architectures() or triton_problem():
        return None
    headers = {language_model_name(name) or name: (each.shape, each.dtype) for name, each in tensors.items()}
    coded = packed_codes(headers, shape.quantisation)
    return coded.sizes(shape, tied=tied) if coded else None


def _refuse_beyond_machines(folder: Path, shape: ModelConfig, parts: ModelParts) -> None:
    """Raise UnsupportedModel for weights, or keys and values of one context, that no machine could hold: each size may
    be plausible, but their products would overflow what plans and messages hold."""
    weights = sum(part.elements for part in (parts.embedding, *parts.layers, parts.norm, parts.head))
    context = shape.layers * shape.kv_heads * shape.head_dim * shape.max_model_len
    for what, numbers in (("weights", weights), ("keys and values of a context", context)):
        if numbers > _MAX_NUMBERS:
            raise UnsupportedModel(
                f"{folder} describes a model whose {what} are {numbers:.1e} numbers", limit=_MAX_NUMBERS
            )


def _read_config(folder: Path) -> Mapping[str, object]:
    """The folder's config.json, the part on text where it has one for each kind of input."""
    if not is_folder(folder):
        raise UnsupportedModel(f"{folder} is not a folder")
    if not is_file(folder / "config.json"):
        raise UnsupportedModel(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    names = file_names(folder)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise UnsafeWeights(
            f"the weights in {folder} are pickles ({quote_value(pickles[0])}), which can run code when read; "
            "convert them to safetensors",
            file=quote_value(pickles[0]),
        )
    config = read_json_object(folder / "config.json")
    text = config.get("text_config")
    whole = {**config, **text} if isinstance(text, dict) else config
    for key in (*_COUNTED, *(key for keys in _NAMES.values() for key in keys)):
        size = whole.get(key)
        if isinstance(size, int | float):
            refuse_more(key, size, MAX_LAYERS if key in _COUNTED else MAX_SIZE)
    return whole


def _shape(folder: Path, config: Mapping[str, object], tensors: Mapping[str, TensorHeader]) -> ModelConfig:
    try:
        return read_model_config(folder)
    except UnsupportedModel:
        return _general_shape(folder, config, tensors)


def _general_shape(folder: Path, config: Mapping[str, object], tensors: Mapping[str, TensorHeader]) -> ModelConfig:
    """The shape of a model of any kind. Raises UnsupportedModel where config.json gives no number of layers."""
    sizes = {name: _size(config, keys) for name, keys in _NAMES.items()}
    layers, hidden, heads = sizes["layers"], sizes["hidden"], max(1, sizes["heads"])
    if not layers:
        raise UnsupportedModel(f"config.json in {folder} has no number of layers")
    dtype = config.get("torch_dtype") or config.get("dtype")
    return ModelConfig(
        architecture=named_architecture(config),
        traits=Traits(windows=full_attention(layers)),
        vocab_size=sizes["vocabulary"],
        hidden_size=hidden,
        intermediate_size=sizes["inner"] or 4 * hidden,
        layers=layers,
        heads=heads,
        kv_heads=sizes["kv_heads"] or heads,
        head_dim=sizes["head_dim"] or hidden // heads,
        norm_eps=1e-6,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=RopeConfig(),
        max_model_len=read_context(config),
        eos_token_ids=(),
        checkpoint_dtype=next((name for name in _DTYPES if name == dtype), "bfloat16" if dtype else "float32"),
    )


def _size(config: Mapping[str, object], keys: tuple[str, ...]) -> int:
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)


def _expected_parts(shape: ModelConfig) -> ModelParts:
    """The parts that a Llama of this shape has, with its experts."""
    attention_width = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = (shape.hidden_size * (attention_width + 2) + _mlp_elements(shape, layer) for layer in range(shape.layers))
    embedding = shape.vocab_size * shape.hidden_size
    return ModelParts(
        embedding=_floats(embedding),
        layers=tuple(map(_floats, layers)),
        norm=_floats(shape.hidden_size),
        head=_floats(0 if shape.tie_embeddings else embedding),
    )


def _mlp_elements(shape: ModelConfig, layer: int) -> int:
    experts = shape.traits.experts_of(layer)
    if experts is None:
        return 3 * shape.hidden_size * shape.intermediate_size
    return mixture_elements(experts, shape.hidden_size)


def _floats(elements: int) -> Part:
    return Part(elements=elements, packed_bytes=2 * elements)


def _stamp(files: list[Path]) -> str:
    found = [file.stat() for file in files]
    return f"{sum(each.st_size for each in found)}@{max((each.st_mtime_ns for each in found), default=0)}"
