"""To GGUF without a vocabulary, as ids go in and come out. weights: bf16, or what llama.cpp quantises them to."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import llama_cpp
import numpy

from tools.benchmarks.convert.command import run
from tools.benchmarks.convert.llama_tensors import as_float32, bfloat16_tensors, gguf_name, laid_out

FILE = "model.gguf"
_QUANTISED = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def convert(model: Path, to: Path, weights: str) -> None:
    """Write bfloat16; then quantise it if asked to. Raises RuntimeError where the quantiser refuses."""
    to.mkdir(parents=True)
    if weights == "bf16":
        write_bfloat16(model, to / FILE)
        return
    plain = to / "plain.gguf"
    write_bfloat16(model, plain)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = _QUANTISED[weights]
    status = llama_cpp.llama_model_quantize(str(plain).encode(), str(to / FILE).encode(), settings)
    if status:
        raise RuntimeError(f"llama.cpp's quantiser ended with error {status}")
    plain.unlink()


def write_bfloat16(model: Path, file: Path) -> None:
    """Matrices as they are, norms in float32, as llama.cpp wants them."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for shard in sorted(model.glob("*.safetensors")):
        for name, bits in bfloat16_tensors(shard):
            if bits.ndim == 1:
                writer.add_tensor(gguf_name(name), as_float32(bits))
            else:
                matrix = numpy.ascontiguousarray(laid_out(name, bits, config)).view(numpy.uint8)
                writer.add_tensor(gguf_name(name), matrix, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    run(convert)
