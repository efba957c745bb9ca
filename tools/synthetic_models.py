"""Models of a known shape with random weights, to measure hardware and engines without a download.

`python -m tools.synthetic_models 7b-4.0bpw FOLDER` makes one.

They are ordinary folders (config.json, safetensors, tokenizer.json) that every engine reads. Every id of the vocabulary
is a token with text, so that answers cost as much to detokenize and to send as real ones do; what they say is noise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from console.bench.progress import Progress
from engine.errors import InvalidRequest
from tools.command import exit_code
from tools.exl2_writer.bit_allocation import WIDTHS, MatrixShape

_DESCRIPTION = "Make a model folder of a known shape with random weights: what it says is noise, its speed is real."

# Random EXL2 matrices, packed without quantising anything: every int32 is a valid word of every bit width.

HEAD_BITS = 6
MIN_BITS, MAX_BITS = 2.2, 8.0
_GROUP_ROWS = 128
_FIRST_CODE, _CODES = 8, 16
_CODES_PER_WORD = 8
_MEAN_SQUARE = sum((code + 1) ** 2 for code in range(_FIRST_CODE, _CODES)) / (_CODES - _FIRST_CODE)


def declaration(bits: float) -> dict[str, object]:
    """quantization_config of a model that was packed so."""
    calibration = {"rows": 0, "length": 0, "dataset": "none, random weights"}
    return {
        "quant_method": "exl2",
        "version": "0.2.4",
        "bits": bits,
        "head_bits": HEAD_BITS,
        "calibration": calibration,
    }


def random_linear(rows: int, columns: int, bits: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The stored tensors of a layer of `rows` inputs and `columns` outputs by the last part of their names, with about
    `bits` bits for each weight, all counted; weights deviate by 1 / sqrt(rows)."""
    shape = MatrixShape(rows, columns, _GROUP_ROWS)
    heights, widths = shape.group_rows(), group_widths(shape, bits)
    words = [height * width // 32 for height, width in zip(heights, widths, strict=True)]
    starts = [sum(words[:place]) for place in range(len(words))]
    spread = torch.tensor([2**width / math.sqrt(12) for width in widths])
    return {
        "q_weight": _random_words(sum(words), shape.stored_columns, generator),
        "q_invperm": torch.randperm(rows, generator=generator).to(torch.int32),
        "q_scale": _random_codes(len(widths), shape.stored_columns, generator),
        "q_scale_max": (256 * rows**-0.5 / _MEAN_SQUARE / spread).half(),
        "q_groups": torch.tensor([each for pair in zip(widths, starts, strict=True) for each in pair]).to(torch.int16),
    }


@cache
def stored_linear(rows: int, columns: int, bits: float) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype in safetensors' words and shape of what `random_linear` makes."""
    shape = MatrixShape(rows, columns, _GROUP_ROWS)
    heights, widths = shape.group_rows(), group_widths(shape, bits)
    words = sum(height * width // 32 for height, width in zip(heights, widths, strict=True))
    return {
        "q_weight": ("I32", (words, shape.stored_columns)),
        "q_invperm": ("I32", (rows,)),
        "q_scale": ("I32", (len(widths), shape.stored_columns // _CODES_PER_WORD)),
        "q_scale_max": ("F16", (len(widths),)),
        "q_groups": ("I16", (2 * len(widths),)),
    }


def group_widths(shape: MatrixShape, bits: float) -> list[int]:
    """A width for each group, falling, such that the whole comes near to `bits` for each weight and not above it where
    the narrowest can be kept."""
    widths = [WIDTHS[0]] * len(shape.group_rows())
    for wider in WIDTHS[1:]:
        for place in range(len(widths)):
            tried = [*widths[:place], wider, *widths[place + 1 :]]
            if shape.stored_bits(tried) > bits * shape.elements:
                return widths
            widths = tried
    return widths


def _random_words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Uniform over all int32."""
    halves = torch.randint(-(2**15), 2**15, (rows, columns * 2), generator=generator, dtype=torch.int16)
    return halves.view(torch.int32)


def _random_codes(groups: int, columns: int, generator: torch.Generator) -> Tensor:
    """Scale codes from the upper half, eight in a word."""
    lanes = torch.randint(
        _FIRST_CODE, _CODES, (groups, columns // _CODES_PER_WORD, _CODES_PER_WORD), generator=generator
    )
    return (lanes << 4 * torch.arange(_CODES_PER_WORD)).sum(dim=2).to(torch.int32)


# A tokenizer of any size with nothing to learn from: bytes, and merges of letters in alphabetical order.

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; a turn and an answer end with <|im_end|>."""

PAD_TOKEN_ID = 0
EOS_TOKEN_IDS = (2, 0)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPACE = "Ġ"  # how byte-level vocabularies write one
_PAIRS = tuple(product((_SPACE, *ascii_lowercase), ascii_lowercase))
_INNER_PAIRS = tuple(product(ascii_lowercase, repeat=2))


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer (any text round-trips) of exactly `vocab_size` ids, with a ChatML template.

    Raises InvalidRequest for fewer ids than bytes and special tokens need.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(plain):
        raise InvalidRequest(
            f"a tokenizer of {vocab_size} ids cannot be made: bytes and special tokens are {len(plain)}"
        )
    merges = list(islice(_merges(), vocab_size - len(plain)))
    words = plain + ["".join(pair) for pair in merges]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _merges() -> Iterator[tuple[str, str]]:
    """Words of two letters, then of three, then of four: 494 thousand, none twice."""
    pairs = ["".join(pair) for pair in _PAIRS]
    inner = ["".join(pair) for pair in _INNER_PAIRS]
    return chain(_PAIRS, product(pairs, ascii_lowercase), product(pairs, inner))


Config = dict[str, object]
TensorShapes = dict[str, tuple[int, ...]]

_Draw = Callable[[str, tuple[int, ...]], dict[str, torch.Tensor]]
_PACKED = re.compile(r"(.+)-(\d+(?:\.\d+)?)bpw")
_SHARD_BYTES = 2 << 30
_BF16_BYTES = 2
ITEM_BYTES = MappingProxyType({"BF16": 2, "F16": 2, "I16": 2, "I32": 4})
"""Of one number of a dtype, by its name in safetensors."""


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, *, tied: bool, **more: object
) -> MappingProxyType[str, object]:
    return MappingProxyType(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            **more,
        }
    )


_MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}

SHAPES = MappingProxyType(
    {
        "135m": _llama(576, 30, 9, 3, 1536, 49152, tied=True),
        "0.5b": _llama(1024, 24, 16, 8, 4864, 32000, tied=True),
        "1b": _llama(2048, 16, 32, 8, 8192, 128256, tied=True),
        "3b": _llama(3072, 28, 24, 8, 8192, 128256, tied=True),
        "7b": _llama(4096, 32, 32, 32, 11008, 32000, tied=False),
        "13b": _llama(5120, 40, 40, 40, 13824, 32000, tied=False),
        "mixtral-tiny": _llama(512, 8, 8, 4, 1024, 32000, tied=False, **_MIXTURE),
    }
)
"""Name of a shape -> the keys of config.json that make it; `make_synthetic` takes these names."""


def make_synthetic(
    shape: str,
    folder: Path,
    *,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a model of `shape` to `folder` (made if missing) and return it: in bfloat16, or "7b-4.0bpw" in EXL2.

    A folder that holds that shape and seed already is left as it is. Memory: one shard (2 GiB) at a time.
    report: bytes of weights made, and of all weights.
    Raises InvalidRequest where the name is none of SHAPES, OSError where the disk refuses.
    """
    config = synthetic_config(shape, seed=seed)
    text = json.dumps(config, indent=2)
    config_file = folder / "config.json"
    if config_file.is_file() and config_file.read_text(encoding="utf-8") == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    for stale in (*folder.glob("model*.safetensors*"), *folder.glob(".tmp*")):  # safetensors writes to .tmp* first
        stale.unlink()
    draw = _drawing(_parts(shape)[1], torch.Generator().manual_seed(seed))
    _write_weights(folder, tensor_shapes(config), _reporting(shape, draw, report))
    write_tokenizer(folder, vocab_size=_number(config, "vocab_size"))
    endings = {"eos_token_id": list(EOS_TOKEN_IDS), "pad_token_id": PAD_TOKEN_ID}
    (folder / "generation_config.json").write_text(json.dumps(endings, indent=2), encoding="utf-8")
    config_file.write_text(text, encoding="utf-8")  # last: a folder with one is complete
    return folder


def synthetic_config(shape: str, *, seed: int = 0) -> Config:
    """config.json of a synthetic model of `shape`. Raises InvalidRequest where there is no such shape."""
    name, bits = _parts(shape)
    if name not in SHAPES:
        names = ", ".join(SHAPES)
        raise InvalidRequest(f'there is no synthetic shape "{name}"; there are {names}', param="shape")
    # EXL2 stores a head for models whose head is the embedding, too.
    packed = {} if bits is None else {"quantization_config": declaration(bits), "tie_word_embeddings": False}
    return {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16384,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_IDS[0],
        "torch_dtype": "bfloat16",
        **SHAPES[name],
        **packed,
        "synthetic": {"shape": shape, "seed": seed},
    }


def _parts(shape: str) -> tuple[str, float | None]:
    """The name and the bits of EXL2 of "7b-4.0bpw"; None for bfloat16. Raises InvalidRequest for bits out of range."""
    packed = _PACKED.fullmatch(shape)
    if packed is None:
        return shape, None
    bits = float(packed[2])
    if not MIN_BITS <= bits <= MAX_BITS:
        raise InvalidRequest(f"EXL2 has {MIN_BITS} to {MAX_BITS} bits for each weight, not {packed[2]}", param="shape")
    return packed[1], bits


def tensor_shapes(config: Config) -> TensorShapes:
    """Names and shapes of the weights of a Llama or Mixtral with this config.json, in the order of their use."""
    hidden, inner, vocab = (_number(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    kv = kv_heads * (hidden // heads)
    attention: TensorShapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
    }
    if config["model_type"] == "mixtral":
        experts = _number(config, "num_local_experts")
        mlp: TensorShapes = {"block_sparse_moe.gate": (experts, hidden)}
        for number in range(experts):
            expert = f"block_sparse_moe.experts.{number}"
            mlp |= {f"{expert}.w1": (inner, hidden), f"{expert}.w2": (hidden, inner), f"{expert}.w3": (inner, hidden)}
    else:
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes: TensorShapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(_number(config, "num_hidden_layers")):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in (attention | mlp).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def stored_shapes(shape: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype in safetensors' words ("BF16") and shape of every tensor that a model of `shape` stores. Raises
    InvalidRequest where there is no such shape."""
    bits = _parts(shape)[1]
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, size in tensor_shapes(synthetic_config(shape)).items():
        if bits is None or not _is_packed(name, size):
            stored[name] = ("BF16" if bits is None else "F16", size)
            continue
        parts = stored_linear(size[1], size[0], _bits_of(name, bits))
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    return stored


def _write_weights(folder: Path, shapes: TensorShapes, draw: _Draw) -> None:
    shards = list(_shards(shapes))
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor for key, size in shard.items() for name, tensor in draw(key, size).items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if not single:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(shapes: TensorShapes) -> Iterator[TensorShapes]:
    shard: TensorShapes = {}
    size = 0
    for name, shape in shapes.items():
        if shard and size + _nbytes(shape) > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += _nbytes(shape)
    yield shard


def _drawing(bits: float | None, generator: torch.Generator) -> _Draw:
    """Return a function that makes the stored tensors of a weight."""

    def draw(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        if bits is None or not _is_packed(name, shape):
            tensor = _draw(name, shape, generator)
            return {name: tensor if bits is None else tensor.half()}
        parts = random_linear(shape[1], shape[0], _bits_of(name, bits), generator)
        return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    return draw


def _reporting(shape: str, draw: _Draw, report: Callable[[int, int], None]) -> _Draw:
    """Report the bytes made so far, and all of them, after each weight."""
    total = sum(math.prod(size) * ITEM_BYTES[dtype] for dtype, size in stored_shapes(shape).values())
    done = 0

    def reported(name: str, size: tuple[int, ...]) -> dict[str, torch.Tensor]:
        nonlocal done
        tensors = draw(name, size)
        done += sum(tensor.nbytes for tensor in tensors.values())
        report(done, total)
        return tensors

    return reported


def _bits_of(name: str, bits: float) -> float:
    return HEAD_BITS if name == "lm_head.weight" else bits


def _is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """EXL2 leaves norms, the embedding and the gates of experts as they are."""
    return len(shape) == 2 and not name.endswith(("embed_tokens.weight", "block_sparse_moe.gate.weight"))


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms of one; the rest normal, scaled so that activations neither grow nor vanish over the layers.

    A small embedding keeps tied heads from repeating the last token for ever.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    scale = 0.02 if name == "model.embed_tokens.weight" else float(shape[1]) ** -0.5
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=scale, generator=generator)


def _nbytes(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * _BF16_BYTES


def _number(config: Config, key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value


# A synthetic model without its weights: config.json, the tokenizer, and safetensors that are a header and a hole.


def sketch_synthetic(shape: str, folder: Path) -> Path:
    """Write to `folder` what `make_synthetic` would, as far as the model's size depends on it; no byte of a weight is
    written. Raises InvalidRequest where there is no such shape, OSError where the disk refuses."""
    config = synthetic_config(shape)
    vocab_size = config["vocab_size"]
    assert isinstance(vocab_size, int)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size) in stored_shapes(shape).items():
        start, end = end, end + math.prod(size) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)
    write_tokenizer(folder, vocab_size=vocab_size)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic_models", description=_DESCRIPTION)
    parser.add_argument("shape", metavar="SHAPE", help=f"{', '.join(SHAPES)}, or one in EXL2, as 7b-4.0bpw")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to make")
    parser.add_argument("--sketch", action="store_true", help="without weights: enough for 'ericllm estimate'")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: _make(arguments.shape, arguments.folder, sketch=arguments.sketch))


def _make(shape: str, folder: Path, *, sketch: bool) -> None:
    progress = Progress(sys.stderr)
    try:
        if sketch:
            sketch_synthetic(shape, folder)
        else:
            make_synthetic(shape, folder, report=lambda done, all_: progress.show(f"{100 * done // all_}% of {shape}"))
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written: {error.strerror or error}", param="folder") from error
    finally:
        progress.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
