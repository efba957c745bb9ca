"""Small random models in Hugging Face's folder layout, made in milliseconds: what tests load instead of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2 of every tiny tokenizer; a turn and an answer end with <|im_end|>."""

EOS_TOKEN_IDS = (2, 0)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ARCHITECTURES = tuple(_MODEL_TYPES)
"""Those with one MLP a layer."""

_MIXTURE_TYPES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
MIXTURES = tuple(_MIXTURE_TYPES)
"""Those with experts in its place."""

_QWEN = {"moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_EXPERT_KEYS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2MoeForCausalLM": _QWEN
    | {"num_experts": 6, "num_experts_per_tok": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 72},
    "Qwen3MoeForCausalLM": _QWEN
    | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 24, "sliding_window": None},
}
"""What config.json of a mixture has besides."""

_MERGES_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other one there, "
    "the model answers the question that the user asks in the chat, token by token. "
) * 4


def make_tiny_model(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tie: bool = False,
    max_position_embeddings: int = 512,
    vocab_size: int = 320,
    with_tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of about 100k parameters to `folder` (made if missing) and return it.

    shards: how many safetensors files the weights are spread over (an index is written from two on).
    tie: whether the output head is the embedding.  overrides: any key of config.json, e.g. `num_hidden_layers=1`,
    `rope_scaling={...}`, `sliding_window=16`; None removes nothing, it is written as null.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        architecture,
        dtype=dtype,
        tie=tie,
        max_position_embeddings=max_position_embeddings,
        vocab_size=vocab_size,
        **overrides,
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(EOS_TOKEN_IDS), "pad_token_id": 0})
    write_weights(folder, random_weights(config, seed=seed), shards=shards)
    if with_tokenizer:
        write_tokenizer(folder, vocab_size=vocab_size)
    return folder


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model. `tie` and `dtype` are short for tie_word_embeddings and torch_dtype."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": (_MODEL_TYPES | _MIXTURE_TYPES).get(architecture, "unknown"),
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": 320,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_IDS[0],
        "tie_word_embeddings": overrides.pop("tie", False),
        "torch_dtype": overrides.pop("dtype", "float32"),
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    if architecture == "Qwen2ForCausalLM":
        config |= {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 0}
    if architecture == "Qwen3ForCausalLM":
        config |= {"head_dim": 24, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0}
    return config | _EXPERT_KEYS.get(architecture, {}) | overrides


def random_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor that `config` asks for, scaled so that logits differ clearly from token to token."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, str(config["torch_dtype"]))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if "norm" in name:
            value = 1.0 + 0.1 * draw(*shape)
        elif name.endswith(".bias"):
            value = 0.3 * draw(*shape)
        elif name == "model.embed_tokens.weight":
            value = draw(*shape)
        else:
            value = draw(*shape) * shape[1] ** -0.5 * 1.5
        tensors[name] = value.to(dtype).contiguous()
    return tensors


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers keeps for `config`."""
    architecture = config["architectures"][0]
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads, vocab = config["num_key_value_heads"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias or architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
    linears = {
        "self_attn.q_proj": ((heads * head_dim, hidden), qkv_bias),
        "self_attn.k_proj": ((kv_heads * head_dim, hidden), qkv_bias),
        "self_attn.v_proj": ((kv_heads * head_dim, hidden), qkv_bias),
        "self_attn.o_proj": ((hidden, heads * head_dim), attention_bias),
    }
    mlp = {
        "mlp.gate_proj": ((inner, hidden), bool(config.get("mlp_bias", False))),
        "mlp.up_proj": ((inner, hidden), bool(config.get("mlp_bias", False))),
        "mlp.down_proj": ((hidden, inner), bool(config.get("mlp_bias", False))),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if _has_experts(config, layer):
            shapes |= {f"{prefix}.{name}": shape for name, shape in _expert_shapes(config).items()}
        for name, (shape, bias) in (linears if _has_experts(config, layer) else linears | mlp).items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has experts in place of its MLP."""
    architecture = config["architectures"][0]
    if architecture == "MixtralForCausalLM":
        return True
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return architecture in _MIXTURE_TYPES and sparse and layer not in config["mlp_only_layers"]


def _expert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The weights of a layer with experts, relative to it."""
    hidden = config["hidden_size"]
    if config["architectures"][0] == "MixtralForCausalLM":
        prefix, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
        count, inner = config["num_local_experts"], config["intermediate_size"]
    else:
        prefix, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
        count, inner = config["num_experts"], config["moe_intermediate_size"]
    shapes = {f"{prefix}.gate.weight": (count, hidden)}
    for number in range(count):
        expert = f"{prefix}.experts.{number}"
        shapes |= {f"{expert}.{gate}.weight": (inner, hidden), f"{expert}.{up}.weight": (inner, hidden)}
        shapes[f"{expert}.{down}.weight"] = (hidden, inner)
    shared = config.get("shared_expert_intermediate_size")
    if shared is not None:
        expert = f"{prefix}.shared_expert"
        shapes |= {f"{expert}.{gate}.weight": (shared, hidden), f"{expert}.{up}.weight": (shared, hidden)}
        shapes |= {f"{expert}.{down}.weight": (hidden, shared), f"{expert}_gate.weight": (1, hidden)}
    return shapes


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 1) -> None:
    """Save `tensors` as one model.safetensors, or round-robin over `shards` files with their index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    weight_map = {tensor: names[position % shards] for position, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, *, vocab_size: int = 320) -> None:
    """Write a byte-level BPE tokenizer (any text round-trips) of at most `vocab_size` ids, with a ChatML template."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size is {vocab_size}; bytes and special tokens need {256 + len(SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_MERGES_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
