"""From a model folder and its settings to the library's config object."""

from __future__ import annotations

from typing import Any

from engine.backends.context_length import context_length
from engine.backends.exllama.folder import ModelFolder
from engine.backends.exllama.parts import MAX_Q_SIZE, Library
from engine.backends.exllama.sizes import PAGE_TOKENS
from engine.config import MAX_STRETCH, ModelSpec
from engine.errors import BackendUnavailable, InvalidRequest, UnsupportedModel
from engine.models.vocabulary import refuse_other_vocabulary as refuse_other_tokens

CHUNK_TOKENS = 2048
"""Most tokens of one sequence that are computed at once; the library's buffers are made for as many."""

DEFAULT_DRAFT_TOKENS = 4

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
            f"cache_bits is {spec.cache_bits}; heads of {config.head_dim} elements can be kept in 16 bits alone",
            param="cache_bits",
        )
    return max_model_len


def refuse_settings(spec: ModelSpec) -> None:
    """Raise InvalidRequest for the first setting that this backend never honours, or not together with another."""
    drafts = (spec.draft_model is not None) + spec.ngram_draft
    refused: tuple[tuple[str, bool, str], ...] = (
        ("dtype", spec.dtype not in ("auto", "float16"), "exllamav2 computes in float16 alone"),
        ("ngram_draft", drafts > 1, "a draft model guesses already"),
        ("draft_tokens", spec.draft_tokens is not None and not drafts, "it needs draft_model or ngram_draft"),
        (
            "draft_tokens",
            spec.draft_tokens is not None and not 1 <= spec.draft_tokens < MAX_Q_SIZE,
            f"it must be between 1 and {MAX_Q_SIZE - 1}",
        ),
        ("lora", spec.lora is not None and spec.tensor_parallel, "exllamav2 splits no adapter over GPUs"),
    )
    for param, is_refused, reason in refused:
        if is_refused:
            raise InvalidRequest(f"{param} cannot be honoured: {reason}", param=param)


def draft_tokens(spec: ModelSpec) -> int:
    """Tokens guessed ahead per step; 0 without speculation."""
    if spec.draft_model is None and not spec.ngram_draft:
        return 0
    return spec.draft_tokens or DEFAULT_DRAFT_TOKENS


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
        (folder.quantisation != "exl2", f"exllamav2 splits EXL2 weights alone, and these are {folder.dtype}"),
        (bool(config.intermediate_size % 128), f"the inner size, {config.intermediate_size}, is no multiple of 128"),
    )
    for is_refused, reason in refused:
        if is_refused:
            raise InvalidRequest(f"tensor_parallel cannot be honoured: {reason}", param="tensor_parallel")


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
            f"{param} cannot be honoured: {config.architecture} learned its positions and has no RoPE to stretch",
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
    held = min(max_model_len, spec.kv_cache_tokens or CHUNK_TOKENS, CHUNK_TOKENS)
    chunk = _whole_pages(held)
    config.max_batch_size = 1
    config.max_input_len = chunk
    config.max_attention_size = chunk**2
    config.max_output_len = min(chunk, max_sequences * MAX_Q_SIZE) if spec.tensor_parallel else _OUTPUT_ROWS


def _whole_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def refuse_other_vocabulary(main: ModelFolder, draft: ModelFolder, main_size: int, draft_size: int) -> None:
    """Raise UnsupportedModel where a draft model's token ids mean other texts than the main model's."""
    if draft_size > main_size:
        raise UnsupportedModel(
            f"the draft model {draft.path.name} has another vocabulary than {main.path.name}, so it cannot guess for it"
        )
    refuse_other_tokens(main.path, draft.path)
