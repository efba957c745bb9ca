"""How a Llama's tensors are named and laid out where llama.cpp reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a weight there. Raises KeyError for one that a Llama has not."""
    base = name.removesuffix(".weight")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight" if layer else f"{_NAMES[base]}.weight"


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """A query or key projection [heads * dim, in] with rotary pairs side by side, not half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def laid_out(name: str, weight: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """A weight as llama.cpp expects its rows."""
    if "q_proj" in name:
        return permuted(weight, config["num_attention_heads"])
    if "k_proj" in name:
        return permuted(weight, config["num_key_value_heads"])
    return weight


def bfloat16_tensors(file: Path) -> Iterator[tuple[str, NDArray[numpy.uint16]]]:
    """Names and bits of the tensors of a safetensors file, all of which are bfloat16."""
    with file.open("rb") as source:
        header_bytes = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(header_bytes))
    data = numpy.memmap(file, dtype=numpy.uint8, mode="r", offset=8 + header_bytes)
    for name, tensor in header.items():
        if name != "__metadata__":
            first, end = tensor["data_offsets"]
            yield name, numpy.frombuffer(data[first:end], dtype=numpy.uint16).reshape(tensor["shape"])


def as_float32(bits: NDArray[numpy.uint16]) -> NDArray[numpy.float32]:
    """Return the values of bfloat16 bits."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)
