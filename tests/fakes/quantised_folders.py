"""A tiny model twice: quantised, and plain with the very weights that the quantised one stands for."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.checkpoints.exl3 import Exl3Linear
from tests.fakes import awq_tensors, exl2_tensors, exl3_tensors, fp8_tensors, gptq_tensors
from tests.fakes.tiny_models import make_tiny_model

Method = Literal["exl2", "exl3", "gptq", "awq", "fp8", "fp8-channel"]
"""fp8: with scales for blocks, as DeepSeek and Qwen3 have them. fp8-channel: for rows, as compressed-tensors writes
them."""

GPTQ_GROUP_ROWS = AWQ_GROUP_ROWS = 32
FP8_BLOCK = (48, 40)
"""Divides nothing evenly."""

_EXL2_GROUPS: dict[int, exl2_tensors.Groups] = {
    40: [(6, 32), (4, 8)],
    64: [(8, 16), (5, 32), (2, 16)],
    128: [(6, 64), (4, 24), (4, 8), (3, 32)],
}
"""Groups of every width, short last ones among them, by input features."""

_BIAS_MULTIPLE: dict[Method, int] = {"exl2": 32, "exl3": 128}
_EXL3_BITS = (4, 3, 6, 5, 2.5, 8, 1, 7, 2)
"""Of a model's layers in turn: folders mix them."""

_SETTINGS: dict[Method, dict[str, Any]] = {
    "exl2": {"quant_method": "exl2", "bits": 4.5},
    "exl3": {"quant_method": "exl3", "version": "1.6.5", "bits": 4.0, "head_bits": 6, "codebook": "mcg"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP_ROWS, "desc_act": True},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": AWQ_GROUP_ROWS,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
}


@dataclass(frozen=True, slots=True)
class Twins:
    """Two folders of one model; only how they keep their weights differs."""

    quantised: Path
    plain: Path


def make_twins(
    folder: Path, method: Method, architecture: str = "LlamaForCausalLM", *, plain_head: bool = False, **config: Any
) -> Twins:
    """Write both below `folder`; `config` as for make_tiny_model. Linear layers are quantised, the head too unless
    `plain_head`; everything else is float16, but for what FP8 stands for, which is float32. A tied model gets a head of
    its own only in its quantised form."""
    plain = make_tiny_model(folder / "plain", architecture, dtype="float16", **config)
    quantised = make_tiny_model(folder / method, architecture, dtype="float16", **config)
    weights = load_file(plain / "model.safetensors")
    if "lm_head.weight" not in weights and not plain_head:
        weights["lm_head.weight"] = torch.empty_like(weights["model.embed_tokens.weight"])
        edit_config(plain, tie_word_embeddings=False)
    packed: dict[str, Tensor] = {}
    for seed, (name, weight) in enumerate(sorted(weights.items())):
        key, _, kind = name.rpartition(".")
        if weight.dim() == 1 or key == "model.embed_tokens" or (key == "lm_head" and plain_head):
            padding = -len(weight) % _BIAS_MULTIPLE.get(method, 1) if kind == "bias" else 0
            packed[name] = torch.nn.functional.pad(weight, (0, padding)) if padding else weight
            continue
        tensors, weights[name] = _quantised_layer(method, weight.shape[1], weight.shape[0], seed)
        packed |= {f"{key}.{part}": tensor for part, tensor in tensors.items()}
    save_file(weights, plain / "model.safetensors")
    save_file(packed, quantised / "model.safetensors")
    edit_config(quantised, quantization_config=_SETTINGS[method])
    return Twins(quantised, plain)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), encoding="utf-8")


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors by their names with the dots as in the file; None removes one."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def _quantised_layer(method: Method, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of a layer, and the weight [columns, rows] that they stand for: by the format's rules, or for
    EXL3, whose sums a machine may make in an order of its own, by the reader, which is held against them elsewhere."""
    if method == "exl3":
        bits = _EXL3_BITS[seed % len(_EXL3_BITS)]
        tensors = exl3_tensors.random_exl3(
            rows,
            columns,
            bits,
            codebook="mul1" if bits == 2.5 else ("mcg", "plain", "mul1")[seed % 3],
            signs="su" if seed % 4 == 3 else "suh",
            seed=seed,
            scale=0.1,
        )
        weight = torch.empty(columns, rows, dtype=torch.float16)
        Exl3Linear("layer", **tensors).write(weight)
        return tensors, weight
    if method in ("fp8", "fp8-channel"):
        block, name = (FP8_BLOCK, "weight_scale_inv") if method == "fp8" else ((1, rows), "weight_scale")
        tensors = fp8_tensors.random_fp8(columns, rows, block, seed=seed, scale_name=name)
        return tensors, fp8_tensors.dequantise_by_rules(tensors, block)
    if method == "exl2":
        tensors = exl2_tensors.random_exl2(_EXL2_GROUPS[rows], columns, seed=seed, scale_max=(0.01, 0.02))
        matrix = exl2_tensors.dequantise_by_rules(tensors, columns)
    elif method == "awq":
        tensors = awq_tensors.random_awq(rows, columns, rows // AWQ_GROUP_ROWS, seed=seed, scales=(0.02, 0.05))
        matrix = awq_tensors.dequantise_by_rules(tensors)
    else:
        row_groups = [row // GPTQ_GROUP_ROWS for row in range(rows)]
        random.Random(seed).shuffle(row_groups)
        groups = rows // GPTQ_GROUP_ROWS
        tensors = gptq_tensors.random_gptq(rows, columns, groups, seed=seed, g_idx=row_groups, scales=(0.02, 0.05))
        matrix = gptq_tensors.dequantise_by_rules(tensors, row_groups)
    return tensors, matrix.t().contiguous()
