"""GGUF files made of small model folders, as llama.cpp's convert_hf_to_gguf.py makes them: with the names and the
writer of the package gguf, and nothing of ours."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quants
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file
from torch import Tensor

_Json = Mapping[str, Any]

_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
}
_PERMUTED = ("llama", "mistral3", "granite", "smollm3")
_FLAGS = {
    "add_bos": "add_add_bos_token",
    "add_eos": "add_add_eos_token",
    "add_space_prefix": "add_add_space_prefix",
    "remove_extra_whitespaces": "add_remove_extra_whitespaces",
}
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_HEAD_NORM = re.compile(r"(.+)\.([qk])_layernorm\.norms\.(\d+)\.weight")
_MISTRAL_EXPERTS = {"w1": "w1", "w2": "w2", "w3": "w3"}


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] = {},
    name: str = "",
    apart: bool = False,
    **tokenizer: Any,
) -> Path:
    """Write the model in `folder` to a GGUF file, and return its path.

    kind: of matrices, as ggml calls it; kinds: of some parts of layers.  name: of the architecture, where llama.cpp has
    several for it.  apart: a tensor for each expert, as files of early 2024 have it.  tokenizer: see `add_tokenizer`.
    """
    config = json.loads((folder / "config.json").read_text())
    name = name or _NAMES[config["architectures"][0]]
    arch = next(arch for arch, each in MODEL_ARCH_NAMES.items() if each == name)
    writer = GGUFWriter(file, name)
    _add_shape(writer, name, config)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder, **tokenizer)
    for tensor_name, tensor in _tensors(folder, arch, name, config):
        is_mixture = apart and "_exps." in tensor_name
        parts = enumerate(tensor) if is_mixture else ((None, tensor),)
        for number, part in parts:
            part_name = tensor_name if number is None else tensor_name.replace("_exps.", f".{number}.")
            own = next((each for part_of, each in kinds.items() if f".{part_of}." in part_name), kind)
            _add_tensor(writer, part_name, part, GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Metadata.


def _rope(config: _Json) -> dict[str, Any]:
    """Of the layers that see all, with the base and the rotated part in it."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found = dict(found.get("full_attention", found))
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            found.setdefault(key, config[key])
    return found


def _head_dim(config: _Json) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_shape(writer: GGUFWriter, name: str, config: _Json) -> None:
    rope, head_dim, heads = _rope(config), _head_dim(config), config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    if name == "stablelm":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config["use_parallel_residual"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if name not in ("gemma2", "stablelm"):
        writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if name in ("llama", "mistral3", "granite", "smollm3"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if name in ("phi3", "stablelm"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if config.get("head_dim") is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope_scaling(writer, name, config, rope)
    _add_experts(writer, config)
    _add_own(writer, name, config)


def _add_rope_scaling(writer: GGUFWriter, name: str, config: _Json, rope: _Json) -> None:
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(original)
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("mscale_all_dim", writer.add_rope_scaling_yarn_log_mul),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if name == "phi3":
        original = _original_length(config, rope)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            )


def _original_length(config: _Json, rope: _Json) -> int:
    key = "original_max_position_embeddings"
    return int(config.get(key) or rope.get(key) or config["max_position_embeddings"])


def _add_experts(writer: GGUFWriter, config: _Json) -> None:
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if count and config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if count and config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_own(writer: GGUFWriter, name: str, config: _Json) -> None:
    """What only some architectures say."""
    if name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if name in ("gemma2", "gemma3") and config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


# Tensors.


def _tensors(folder: Path, arch: MODEL_ARCH, name: str, config: _Json) -> Iterator[tuple[str, Tensor]]:
    yield from _rope_factors(name, config)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    for key, tensor in _stacked(stored).items():
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        yield found, _as_converted(name, key, tensor, config)


def _stacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts and the norms of single heads in one tensor each, under the names that the converter gives these."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in stored.items():
        if expert := _EXPERT.fullmatch(key):
            prefix, number, part = expert.groups()
            stem = prefix.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            stem = stem if part in _MISTRAL_EXPERTS else prefix
            parts.setdefault(f"{stem}.experts.{part}.weight", {})[int(number)] = tensor
        elif norm := _HEAD_NORM.fullmatch(key):
            prefix, part, number = norm.groups()
            parts.setdefault(f"{prefix}.{part}_layernorm.weight", {})[int(number)] = tensor
        else:
            whole[key] = tensor
    return whole | {key: torch.stack([each[at] for at in range(len(each))]) for key, each in parts.items()}


def _as_converted(name: str, key: str, tensor: Tensor, config: _Json) -> Tensor:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    module = key.rpartition(".")[0]
    if name in _PERMUTED and module.endswith(("q_proj", "k_proj")):
        count = heads if module.endswith("q_proj") else kv_heads
        return (
            tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    if name.startswith("gemma") and key.endswith("norm.weight"):
        return tensor.float() + 1
    if key.endswith("shared_expert_gate.weight"):
        return tensor.squeeze()
    return tensor


def _rope_factors(name: str, config: _Json) -> Iterator[tuple[str, Tensor]]:
    rope, head_dim = _rope(config), _head_dim(config)
    if name == "phi3" and rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.tensor(list(_llama3_factors(rope, head_dim)))


def _llama3_factors(rope: _Json, head_dim: int) -> Iterator[float]:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    for length in (2 * math.pi / frequencies).tolist():
        if length < original / high:
            yield 1.0
        elif length > original / low:
            yield factor
        else:
            smooth = (original / length - low) / (high - low)
            yield 1 / ((1 - smooth) / factor + smooth)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    """Vectors, routers and norms are floats of 32 bits whatever the file's kind is."""
    values: np.ndarray[Any, Any] = tensor.float().contiguous().numpy()
    if tensor.dim() < 2 or "norm" in name or "ffn_gate_inp" in name:
        kind = GGMLQuantizationType.F32
    writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


# Tokenizers.


def add_tokenizer(
    writer: GGUFWriter,
    folder: Path,
    *,
    pre: str = "gpt-2",
    scores: Mapping[str, float] | None = None,
    charsmap: bytes = b"",
    **flags: bool,
) -> None:
    """Write the tokenizer of a folder. pre: what llama.cpp calls the way in which its text is split.
    scores: of a SentencePiece-like one, by token; those of its BPE merges where none are given.
    charsmap: a unigram model's table of characters.
    flags: add_bos, add_eos, add_space_prefix, remove_extra_whitespaces."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    model, added = tokenizer["model"], {each["content"]: each for each in tokenizer["added_tokens"]}
    is_unigram = model["type"] == "Unigram"
    if is_unigram:
        scores = dict(model["vocab"])
        model["vocab"] = {token: number for number, (token, _) in enumerate(model["vocab"])}
        model["unk_token"] = list(model["vocab"])[model["unk_id"]]
    ids = {number: token for token, number in model["vocab"].items()}
    ids |= {each["id"]: each["content"] for each in added.values()}
    tokens = [ids.get(number, f"[PAD{number}]") for number in range(size)]
    sentencepiece = is_unigram or bool(model.get("byte_fallback"))
    writer.add_tokenizer_model("t5" if is_unigram else "llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if sentencepiece else pre)
    writer.add_token_list(tokens)
    if sentencepiece:
        ranks = {"".join(pair): float(-rank) for rank, pair in enumerate(model.get("merges", ()))}
        found = ranks if scores is None else scores
        writer.add_token_scores([found.get(token, 0.0 if token in added else -1e9) for token in tokens])
    else:
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_token_types(
        [_token_type(token, number, ids, added, model.get("unk_token")) for number, token in enumerate(tokens)]
    )
    numbers = {token: number for number, token in ids.items()}
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if config.get(key) is not None:
            add(numbers[config[key]])
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)
    for flag, value in flags.items():
        getattr(writer, _FLAGS[flag])(value)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])


def _token_type(
    token: str, number: int, ids: Mapping[int, str], added: Mapping[str, _Json], unknown: str | None
) -> TokenType:
    if number not in ids:
        return TokenType.UNUSED
    if token == unknown:
        return TokenType.UNKNOWN
    if token in added:
        return TokenType.CONTROL if added[token]["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else TokenType.NORMAL
