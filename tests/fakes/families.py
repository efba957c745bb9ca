"""Small random models of every family that the torch backend reads, made by transformers itself: what its files are
named, shaped and defaulted to is not ours to say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 1.9, 2.2],
    "long_factor": [1.0, 1.7, 2.9, 4.3, 7.7, 11.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma2": {
            "model_type": "gemma2",
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 13,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        "gemma3": {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "sliding_window": 11,
        },
        "gemma3 scaled": {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
            },
            "final_logit_softcapping": 4.0,
        },
        "phi3": {"model_type": "phi3", "sliding_window": 13},
        "phi4 mini": {
            "model_type": "phi3",
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONGROPE,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        "granite": {
            "model_type": "granite",
            "attention_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        "olmo2": {"model_type": "olmo2", "attention_bias": True, "rope_scaling": LLAMA3},
        "smollm3": {"model_type": "smollm3", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "smollm3, windows": {
            "model_type": "smollm3",
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
        "stablelm 2": {
            "model_type": "stablelm",
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "partial_rotary_factor": 0.5,
        },
    }
)
"""What each is told of itself, by names for tests. Windows and original lengths are shorter than the tests' prompts."""


def make_family(folder: Path, name: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a random model of that family to `folder` and return it. overrides: any key of config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**_SHAPE | dict(FAMILIES[name]) | overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor_name, tensor in model.named_parameters():
        with torch.no_grad():
            _draw(tensor_name, tensor)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


_IMAGES = {
    "gemma3": {"model_type": "siglip_vision_model", "image_size": 28},
    "mistral3": {"model_type": "pixtral", "image_size": 28, "head_dim": 8},
}
_SMALL_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def make_multimodal(folder: Path, kind: str, **text: Any) -> Path:
    """Write a random model of text and images to `folder` and return it. text: keys of its text_config."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, text_config=_SHAPE | text, vision_config=_SMALL_TOWER | _IMAGES[kind])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for tensor_name, tensor in model.named_parameters():
        if "language_model" in tensor_name:
            with torch.no_grad():
                _draw(tensor_name, tensor)
    model.save_pretrained(folder)
    return folder


def as_older_folder(folder: Path) -> None:
    """Rewrite config.json as transformers wrote it before `rope_parameters`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    path.write_text(json.dumps(config))


def _draw(name: str, tensor: torch.Tensor) -> None:
    """Random numbers that make logits differ clearly from token to token."""
    if "norm" in name and name.endswith("weight"):
        tensor.add_(0.2 * torch.randn_like(tensor))
    elif name.endswith("bias"):
        tensor.copy_(0.3 * torch.randn_like(tensor))
    elif "embed_tokens" in name:
        tensor.copy_(0.15 * torch.randn_like(tensor))
    else:
        tensor.copy_(1.5 * tensor.shape[1] ** -0.5 * torch.randn_like(tensor))
