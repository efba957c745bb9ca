"""GGUF files of a known shape with random codes: what they say is noise, their speed and their load time are real.

`python -m tools.synthetic_gguf 7b Q4_0 FILE.gguf` makes one. No weight is quantised: any bytes are codes, and their
scales are such that weights deviate by 1 / sqrt(inputs) and have no mean. Formats: ggml-common.h (llama.cpp).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from tools.command import exit_code
from tools.synthetic_models import SHAPES, synthetic_config, tensor_shapes, write_tokenizer

_Blocks = NDArray[numpy.uint8]

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
    """The name that llama.cpp has for a weight of a Llama. Raises KeyError for one that a Llama has not."""
    base = name.removesuffix(".weight")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight" if layer else f"{_NAMES[base]}.weight"


def _bf16(values: _Blocks, spread: float) -> None:
    """Random signs and fractions, and one exponent for all: values of 1 to 2 times a power of two."""
    exponent = 127 + round(math.log2(spread / math.sqrt(7 / 3)))
    values[:, 0] = (values[:, 0] & 0x7F) | (exponent & 1) << 7
    values[:, 1] = (values[:, 1] & 0x80) | exponent >> 1


def _set_half(blocks: _Blocks, at: int, value: float) -> None:
    blocks[:, at : at + 2] = numpy.array([value], dtype=numpy.float16).view(numpy.uint8)


def _q8_0(blocks: _Blocks, spread: float) -> None:
    _set_half(blocks, 0, spread / (256 / math.sqrt(12)))


def _q4_0(blocks: _Blocks, spread: float) -> None:
    _set_half(blocks, 0, spread / (16 / math.sqrt(12)))


def _q4_1(blocks: _Blocks, spread: float) -> None:
    scale = spread / (16 / math.sqrt(12))
    _set_half(blocks, 0, scale)
    _set_half(blocks, 2, -7.5 * scale)


def _q4_k(blocks: _Blocks, spread: float) -> None:
    """All of its groups get the scale and the minimum 32, whatever the layout of their 6 bits: no random ones, whose
    products with the codes would have a mean."""
    scale = spread / (16 / math.sqrt(12)) / 32
    _set_half(blocks, 0, scale)
    _set_half(blocks, 2, 7.5 * scale)
    blocks[:, 4:12], blocks[:, 12:16] = 32, 0
    blocks[:, 4:12] |= 2 << 6  # the high bits of the last four groups; their low ones are 0


def _q6_k(blocks: _Blocks, spread: float) -> None:
    blocks[:, 192:208] = 32
    _set_half(blocks, 208, spread / (64 / math.sqrt(12)) / 32)


_FORMATS: Mapping[str, tuple[Callable[[_Blocks, float], None], str]] = MappingProxyType(
    {
        "BF16": (_bf16, "BF16"),
        "Q8_0": (_q8_0, "Q8_0"),
        "Q4_0": (_q4_0, "Q6_K"),
        "Q4_1": (_q4_1, "Q6_K"),
        "Q4_K": (_q4_k, "Q6_K"),
        "Q6_K": (_q6_k, "Q6_K"),
    }
)
"""Format -> what sets its scales, and the format of the embedding and the head beside it, as llama.cpp chooses it."""

_EMBEDDING_SPREAD = 0.02


def write_synthetic_gguf(shape: str, kind: str, file: Path, *, seed: int = 0) -> None:
    """Write a model of `shape` whose matrices are in the format `kind`; norms are ones in float32.

    Memory: one tensor at a time. The file appears whole or not at all. Raises InvalidRequest where there is no such
    shape or format, or where its rows are no whole blocks; OSError where the disk refuses.
    """
    config = synthetic_config(shape)
    if kind not in _FORMATS or config["model_type"] != "llama" or "quantization_config" in config:
        raise InvalidRequest(f"there are {', '.join(_FORMATS)} of models of the Llama family in 16 bits", param="kind")
    writer = gguf.GGUFWriter(None, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, config)
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, size in tensor_shapes(config).items():
        outer = name in ("model.embed_tokens.weight", "lm_head.weight")
        own = "F32" if len(size) == 1 else _outer(kind, size[-1]) if outer else kind
        kinds[name] = size, own
        quantisation = gguf.GGMLQuantizationType[own]
        values, num_bytes = gguf.GGML_QUANT_SIZES[quantisation]
        if size[-1] % values:
            raise InvalidRequest(f"{shape} has rows of {size[-1]}, which are no blocks of {own}", param="kind")
        raw = (*size[:-1], size[-1] // values * num_bytes)  # for bytes, the package wants the sizes of bytes
        dtype = numpy.dtype(numpy.float32 if own == "F32" else numpy.uint8)
        writer.add_tensor_info(
            gguf_name(name), size if own == "F32" else raw, dtype, math.prod(raw), raw_dtype=quantisation
        )
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        writer.write_header_to_file(unfinished)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        draw = numpy.random.default_rng(seed)
        for name, (size, own) in kinds.items():
            writer.write_tensor_data(_drawn(name, size, own, draw))
        writer.close()
        unfinished.replace(file)
    except BaseException:
        with suppress(OSError):  # what is buffered is written once more
            writer.close()
        unfinished.unlink(missing_ok=True)
        raise


def _outer(kind: str, columns: int) -> str:
    """The format of the embedding and the head; Q8_0 where rows are no blocks of it, as llama.cpp falls back."""
    outer = _FORMATS[kind][1]
    return "Q8_0" if columns % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[outer]][0] else outer


def _drawn(name: str, size: tuple[int, ...], kind: str, draw: numpy.random.Generator) -> NDArray[Any]:
    if kind == "F32":
        return numpy.ones(size, dtype=numpy.float32)
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = numpy.frombuffer(draw.bytes(math.prod(size) // values * num_bytes), dtype=numpy.uint8)
    blocks = blocks.reshape(-1, num_bytes).copy()
    embedding = name == "model.embed_tokens.weight"
    _FORMATS[kind][0](blocks, _EMBEDDING_SPREAD if embedding else float(size[1]) ** -0.5)
    return blocks.reshape(size[0], -1)


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=config["vocab_size"])
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text())
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_chat_template(settings["chat_template"])


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic_gguf", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("kind", metavar="FORMAT", help=", ".join(_FORMATS))
    parser.add_argument("file", type=Path, metavar="FILE", help="file to make")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: write_synthetic_gguf(arguments.shape, arguments.kind, arguments.file))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
