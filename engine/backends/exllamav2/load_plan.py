"""Plan of a load, from folders and settings, before anything of it reaches a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.backends.common.exllama_memory import PAGE_TOKENS, CacheShape, loaded_bytes, stored_bytes, work_bytes
from engine.backends.common.exllamav2_checkpoint import ModelFolder, read_folder
from engine.backends.common.model_config import context_length
from engine.backends.exllama.load import (
    LoadNumbers,
    Split,
    draft_tokens,
    explain_load,
    plan_split,
    refuse_drafts,
    refuse_other_vocabulary,
)
from engine.backends.exllamav2.library import MAX_Q_SIZE, PACKAGE, Library
from engine.config import MAX_STRETCH, AttentionName, ModelSpec, quote_value
from engine.errors import (
    BackendUnavailable,
    InvalidRequest,
    UnsafeWeights,
    UnsupportedModel,
)
from engine.models.files import read_json_object, refuse_links
from engine.models.headers import TensorHeader, read_header

# From a model folder and its settings to the library's config object.

CHUNK_TOKENS = 2048
"""Most tokens of one sequence that are computed at once; the library's buffers are made for as many."""

_OUTPUT_ROWS = 16
"""Rows of logits that a sequence can give in one step: more than a step with drafts has."""


def read_config(library: Library, folder: ModelFolder) -> Any:
    """The library's config of `folder`, nothing of ours in it but the attention.

    What the environment says of attentions is put aside: the paged one is there, the others are wrong or slower.
    """
    config = library.config()
    config.model_dir = str(folder.path)
    config.prepare()
    config.no_flash_attn, config.no_xformers, config.no_sdpa = False, True, True
    if folder.rope_theta is not None:
        config.rotary_embedding_base = folder.rope_theta
    return config


def apply_settings(config: Any, spec: ModelSpec, *, attention: str, max_sequences: int) -> int:
    """Put `spec` into `config`; returns the context length in tokens, which the config has rounded up to pages.

    Raises InvalidRequest naming a setting that cannot be honoured, BackendUnavailable where the model needs more of
    the attention than is there.
    """
    refuse_settings(spec)
    max_model_len = _context(config, spec)
    _set_experts(config, spec)
    _set_buffers(config, spec, max_model_len, max_sequences)
    _settle_attention(config, attention)
    if spec.cache_bits != 16 and config.head_dim % 32:
        raise InvalidRequest(
            f"cache_bits is {spec.cache_bits}; heads of {config.head_dim} elements need 16 bits",
            param="cache_bits",
        )
    return max_model_len


def refuse_settings(spec: ModelSpec) -> None:
    """Raise InvalidRequest for the first setting that this backend never honours, or not together with another."""
    refuse_drafts(spec, MAX_Q_SIZE - 1)
    refused: tuple[tuple[str, bool, str], ...] = (
        ("dtype", spec.dtype not in ("auto", "float16"), "exllamav2 computes in float16 only"),
        ("lora", spec.lora is not None and spec.tensor_parallel, "exllamav2 does not split adapters over GPUs"),
        (
            "tensor_parallel_size",
            spec.tensor_parallel_size > 1,
            "exllamav2 splits layers over all GPUs, with tensor_parallel",
        ),
    )
    for param, is_refused, reason in refused:
        if is_refused:
            raise InvalidRequest(f"{param} is not supported: {reason}", param=param)


def follow_main(draft: Any, main: Any, *, attention: str) -> None:
    """Give a draft model's config the main one's lengths and buffers, its context stretched where it is shorter.
    Raises as `apply_settings` does for the attention."""
    stretch = main.max_seq_len / native_length(draft)
    if stretch > 1:
        _refuse_fixed_positions(draft, "draft_model")
        draft.scale_alpha_value = stretch
    draft.max_seq_len = main.max_seq_len
    draft.max_batch_size = main.max_batch_size
    draft.max_input_len = main.max_input_len
    draft.max_attention_size = main.max_attention_size
    draft.max_output_len = main.max_output_len
    _settle_attention(draft, attention)


def refuse_tensor_parallel(config: Any, folder: ModelFolder, library: Library) -> None:
    """Raise where a model cannot be split within its layers: the library would fail, or leave parts of it out."""
    arch = config.arch.lm
    refused: tuple[tuple[bool, str], ...] = (
        (library.attention != "flash", f"it needs flash-attn ({library.attention_reason})"),
        (not arch.supports_tp, f"exllamav2 cannot split {config.architecture}"),
        (bool(config.use_qk_norm), f"exllamav2 would leave out the query and key norms of {config.architecture}"),
        (bool(arch.is_moe), "exllamav2 does not split experts"),
        (bool(arch.keys["norm_1_post"]), f"exllamav2 would leave out the post-norms of {config.architecture}"),
        (folder.quantisation != "exl2", f"exllamav2 splits EXL2 weights only, not {folder.dtype}"),
        (bool(config.intermediate_size % 128), f"the inner size, {config.intermediate_size}, is not a multiple of 128"),
    )
    for is_refused, reason in refused:
        if is_refused:
            raise InvalidRequest(f"tensor_parallel is not supported: {reason}", param="tensor_parallel")


def native_length(config: Any) -> int:
    """The context that the model was made for, by its own RoPE scaling."""
    length = int(config.max_seq_len)
    if config.alt_rope_method == "yarn":
        length = max(length, int(config.yarn_rope_factor * config.yarn_rope_original_max_position_embeddings))
    return length


def _settle_attention(config: Any, attention: str) -> None:
    """Let the library see to what the architecture needs of the attention; it would do without pages otherwise."""
    config.arch_compat_overrides(quiet=True)
    if config.no_flash_attn:
        raise BackendUnavailable(
            f"{config.architecture} needs a soft-cap or a sliding window, which the {attention} attention lacks; "
            "--attention triton has them",
            param="attention",
        )


def _context(config: Any, spec: ModelSpec) -> int:
    """Set lengths and RoPE. alpha_value and compress_pos_emb each stretch the longest context by their value."""
    stretch = 1.0
    for param in ("alpha_value", "compress_pos_emb"):
        value = getattr(spec, param)
        if value is not None:
            if not 1.0 <= value <= MAX_STRETCH:
                raise InvalidRequest(f"{param} is {value:g}; it must be between 1 and {MAX_STRETCH:g}", param=param)
            _refuse_fixed_positions(config, param)
            stretch *= value
    longest = int(native_length(config) * stretch)
    length = context_length(spec.max_model_len, int(config.max_seq_len * stretch), longest)
    config.scale_alpha_value = spec.alpha_value or 1.0
    config.scale_pos_emb *= spec.compress_pos_emb or 1.0
    config.max_seq_len = _whole_pages(length)
    return length


def _refuse_fixed_positions(config: Any, param: str) -> None:
    if config.arch.lm.keys["learned_pos_emb"]:
        raise InvalidRequest(
            f"{param} is not supported: {config.architecture} has learned positions, no RoPE",
            param=param,
        )


def _set_experts(config: Any, spec: ModelSpec) -> None:
    if spec.num_experts is None:
        return
    if not config.arch.lm.is_moe:
        raise InvalidRequest(
            f"num_experts is {spec.num_experts}; {config.architecture} has no experts", param="num_experts"
        )
    if not 1 <= spec.num_experts <= config.num_experts:
        raise InvalidRequest(
            f"num_experts is {spec.num_experts}; this model has {config.num_experts}", param="num_experts"
        )
    config.num_experts_per_token = spec.num_experts


def _set_buffers(config: Any, spec: ModelSpec, max_model_len: int, max_sequences: int) -> None:
    """Scratch sizes. A chunk is whole pages and no longer than what the cache will surely hold. Under tensor
    parallelism the logits of a whole step share one pinned buffer, sized by max_output_len."""
    tokens = min(max_model_len, spec.kv_cache_tokens or CHUNK_TOKENS, CHUNK_TOKENS)
    chunk = _whole_pages(tokens)
    config.max_batch_size = 1
    config.max_input_len = chunk
    config.max_attention_size = chunk**2
    config.max_output_len = min(chunk, max_sequences * MAX_Q_SIZE) if spec.tensor_parallel else _OUTPUT_ROWS


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


# LoRA adapters: what a folder holds, whether the library would honour all of it, and applying it.

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_OVERLOOKED = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication", "lora_bias")
"""Keys of PEFT's config that change what is computed and that the library ignores or fails on."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on disk that can be applied. weights_bytes: what it takes on the GPUs, about."""

    config: Path
    weights: Path
    weights_bytes: int


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`. Raises UnsafeWeights for a pickle, UnsupportedModel for what could not be honoured."""
    try:
        refuse_links(folder)
    except OSError as error:
        raise UnsupportedModel(f"{folder} cannot be read: {error.strerror}") from error
    weights = folder / _WEIGHTS
    if not weights.is_file():
        if (folder / _PICKLE).is_file():
            raise UnsafeWeights(
                f"{_PICKLE} is a pickle, which can run code when read; convert the adapter to safetensors", file=_PICKLE
            )
        raise UnsupportedModel(f"{folder} is not a LoRA adapter: it has no {_WEIGHTS}")
    config = read_json_object(folder / _CONFIG)
    if not config:
        raise UnsupportedModel(f"{folder} is not a LoRA adapter: it has no {_CONFIG}")
    _refuse_overlooked(config)
    tensors = read_header(weights)
    _refuse_unpaired(tensors)
    return Adapter(folder / _CONFIG, weights, stored_bytes(tensors))


def load_adapter(lora: Any, model: Any, adapter: Adapter) -> Any:
    """The library's object (`lora` is its class) for `adapter` on `model`.

    Its own way to find the files would prefer a pickle. Raises UnsupportedModel where it does not fit the model.
    """
    if model.config.arch.lm.residual_stream_fp32:
        raise UnsupportedModel(f"exllamav2 applies no LoRA adapter to {model.config.architecture}")
    try:
        return lora(model, str(adapter.config), str(adapter.weights))
    except KeyError as error:
        missing = str(error.args[0]) if error.args else "a layer"
    raise UnsupportedModel(f"the LoRA adapter does not fit the model, which has no {missing}")


def _refuse_unpaired(tensors: Mapping[str, TensorHeader]) -> None:
    """Raise UnsupportedModel for factors that share no rank: the library's kernels go by that of one of them."""
    modules = {name.removesuffix(each) for name in tensors for each in _FACTORS if name.endswith(each)}
    for module in sorted(modules):
        a, b = (tensors.get(module + each) for each in _FACTORS)
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise UnsupportedModel(
                f"the factors of {quote_value(module)} in {_WEIGHTS} share no rank", module=quote_value(module)
            )


def _refuse_overlooked(config: Mapping[str, object]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is {quote_value(kind)}; exllamav2 supports LORA only")
    for key in _OVERLOOKED:
        if config.get(key):
            raise UnsupportedModel(f"the adapter sets {key} in {_CONFIG}, which exllamav2 does not support")
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise InvalidRequest(
                f"{key} in {_CONFIG} is {quote_value(value)}; it must be a number above 0", param="lora"
            )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model of a load: its folder, the library's config of it with settings applied, its cache's shape, and by
    which attention it is computed."""

    folder: ModelFolder
    config: Any
    cache: CacheShape
    attention: str

    @property
    def work_bytes(self) -> int:
        """Bytes that each device needs for it besides weights and cache."""
        config = self.config
        return work_bytes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            chunk_tokens=config.max_input_len,
            triton_head_dim=config.head_dim if self.attention == "triton" else 0,
        )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load. sources: the main model first, then the draft model where there is one.

    library: with the attention that fits.  max_model_len: tokens, as asked for; the config has it rounded up.
    """

    library: Library
    spec: ModelSpec
    sources: tuple[ModelSource, ...]
    adapter: Adapter | None
    split: Split
    max_model_len: int
    max_prompts: int

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed ahead per step."""
        return draft_tokens(self.spec)

    @property
    def is_packed(self) -> bool:
        """True if the main model's weights are quantised."""
        return bool(self.sources[0].folder.quantisation)

    @property
    def weights_bytes(self) -> int:
        """Of all models and the adapter, once loaded."""
        adapter = self.adapter.weights_bytes if self.adapter is not None else 0
        return adapter + sum(loaded_bytes(source.folder.tensors) for source in self.sources)

    @property
    def file_bytes(self) -> int:
        """Of all models, as they lie in their files."""
        return sum(stored_bytes(source.folder.tensors) for source in self.sources)

    @property
    def work_bytes(self) -> int:
        """Bytes that each device needs besides weights and caches."""
        return sum(source.work_bytes for source in self.sources)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers of all models."""
        return sum(source.cache.page_bytes for source in self.sources)

    @property
    def unpacked_page_bytes(self) -> int:
        """Bytes that packed caches add per page on each device."""
        return sum(source.cache.unpacked_page_bytes for source in self.sources)


def plan_load(library: Library, spec: ModelSpec, *, max_prompts: int, gpus: int) -> LoadPlan:
    """Read folders and settings of `spec` for a machine of `gpus` GPUs.

    Raises ModelLoadFailed or a child of it, and InvalidRequest naming a setting that cannot be honoured.
    """
    split = plan_split(spec, gpus, PACKAGE.name)
    main = read_folder(spec.path)
    draft = read_folder(spec.draft_model) if spec.draft_model is not None else None
    adapter = read_adapter(spec.lora) if spec.lora is not None else None
    try:
        config = read_config(library, main)
        engage = library.engage
        if engage is not None:
            library = engage(config, spec.attention, split.numbers)
        if spec.tensor_parallel:
            refuse_tensor_parallel(config, main, library)
        length = apply_settings(config, spec, attention=library.attention, max_sequences=max_prompts)
        sources = [_source(main, config, spec, library.attention)]
        if draft is not None:
            drafting = read_config(library, draft)
            refuse_other_vocabulary(main.path, draft.path, config.vocab_size, drafting.vocab_size)
            if engage is not None:  # the main model's has to do for both
                engage(drafting, cast(AttentionName, library.attention), split.numbers)
            follow_main(drafting, config, attention=library.attention)
            sources.append(_source(draft, drafting, spec, library.attention))
    except Exception as error:
        failure = explain_load(error, LoadNumbers(PACKAGE.name, spec.name, split.names))
        raise failure from error
    return LoadPlan(library, spec, tuple(sources), adapter, split, length, max_prompts)


def _source(folder: ModelFolder, config: Any, spec: ModelSpec, attention: str) -> ModelSource:
    shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, spec.cache_bits)
    return ModelSource(folder, config, shape, attention)
