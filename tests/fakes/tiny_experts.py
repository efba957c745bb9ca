"""What a mixture of experts adds to a tiny model: config.json's keys, and its tensors as transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

MODEL_TYPES = {"MixtralForCausalLM": "mixtral", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe"}

_QWEN = {"moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_KEYS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2MoeForCausalLM": _QWEN
    | {"num_experts": 6, "num_experts_per_tok": 4, "norm_topk_prob": False, "shared_expert_intermediate_size": 72},
    "Qwen3MoeForCausalLM": _QWEN
    | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 24, "sliding_window": None},
}


def expert_config(architecture: str) -> dict[str, Any]:
    """The keys that config.json of such an architecture has besides."""
    return _KEYS.get(architecture, {})


def has_experts(config: Config, layer: int) -> bool:
    """Whether a layer has experts in place of its MLP."""
    architecture = config["architectures"][0]
    if architecture == "MixtralForCausalLM":
        return True
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return architecture in MODEL_TYPES and sparse and layer not in config["mlp_only_layers"]


def expert_shapes(config: Config) -> dict[str, tuple[int, int]]:
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
