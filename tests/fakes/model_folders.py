"""Model folders without sense in their weights: right names, headers and sizes, made without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BYTES = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I16": 2, "U8": 1, "I8": 1}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
"""config.json of a small model that can be loaded."""

TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("BF16", (10, 20)), "b": ("F32", (3,))}
"""Tensors of `write_model` if none are given: 203 parameters, mostly bfloat16."""


def write_model(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    *,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """A folder with config.json (LLAMA's keys, changed by `config`), model.safetensors and a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", TENSORS if tensors is None else tensors)
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of zeros: (dtype, shape) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    body = json.dumps(header).encode()
    file.write_bytes(len(body).to_bytes(8, "little") + body + bytes(end))
