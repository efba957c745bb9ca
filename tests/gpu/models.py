"""Synthetic model folders: small ones to compare bits, and shapes of about 1B and 8B parameters to measure speed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from tests.fakes.exl3_tensors import random_exl3
from tests.fakes.tiny_models import EOS_TOKEN_IDS, tensor_shapes, tiny_config, write_tokenizer
from tests.gpu.exl2_random import WIDTHS, plan_groups, random_exl2, random_words
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured

Method = Literal["gptq", "gptq-act-order", "awq", "fp8"]
"""How linear layers are packed, but for the head, which stays in float16."""

_SMALL_VOCAB = 320
_EXL3_STD = 0.77
"""Deviation of random EXL3 weights of scale 1."""

_DONE = "complete"
_FP8_BLOCK = 128
_CODES_STD = 6.5
"""Of a random 4-bit code less a random zero point."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes, and how an EXL2 folder of it mixes bit widths."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    widths: tuple[int, ...]
    group_rows: int

    def config(self, dtype: str) -> dict[str, Any]:
        """Its config.json."""
        return tiny_config(
            dtype=dtype,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
        )


TINY = Shape("tiny", 256, 512, 4, 4, 2, _SMALL_VOCAB, 4096, WIDTHS, 32)
BILLION = Shape("1b", 2048, 8192, 16, 32, 8, 32000, 16384, (5, 4), 128)
EIGHT_BILLION = Shape("8b", 4096, 14336, 32, 32, 8, 128256, 32768, (5, 5, 4), 128)
"""Llama 3's; packed with 4.65 bits per weight."""


def exl2_model(place: Place, shape: Shape) -> Path:
    """The folder of `shape` with random EXL2 weights, made at first use."""
    folder = place.models / f"{shape.name}-exl2"
    if not (folder / _DONE).exists():
        config = shape.config("float16") | {
            "quantization_config": {
                "quant_method": "exl2",
                "version": "0.3.2",
                "bits": round(sum(shape.widths) / len(shape.widths), 2),
                "head_bits": shape.widths[0],
            }
        }
        _write(folder, shape, config, _exl2_tensors(shape, config))
    return folder


def exl3_model(place: Place, shape: Shape) -> Path:
    """The folder of `shape` with random EXL3 weights of 4 bits, made at first use."""
    folder = place.models / f"{shape.name}-exl3"
    if not (folder / _DONE).exists():
        settings = {"quant_method": "exl3", "version": "1.6.5", "bits": 4.0, "head_bits": 4, "codebook": "mcg"}
        config = shape.config("float16") | {"quantization_config": settings}
        _write(folder, shape, config, _exl3_tensors(config))
    return folder


def plain_model(place: Place, shape: Shape, dtype: str) -> Path:
    """The folder of `shape` with random weights in `dtype`, made at first use."""
    folder = place.models / f"{shape.name}-{dtype}"
    if not (folder / _DONE).exists():
        config = shape.config(dtype)
        _write(folder, shape, config, _plain_tensors(config, getattr(torch, dtype), _device()))
    return folder


def packed_model(place: Place, shape: Shape, method: Method) -> Path:
    """The folder of `shape` with random weights packed by `method`, made at first use."""
    folder = place.models / f"{shape.name}-{method}"
    if not (folder / _DONE).exists():
        config = shape.config("float16") | {"quantization_config": _packing(method, shape.group_rows)}
        _write(folder, shape, config, _packed_tensors(config, method, shape.group_rows))
    return folder


def packed_tensors(
    method: Method, inputs: int, outputs: int, group_rows: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random tensors of a layer by their short names, on the generator's device, in groups of `group_rows` inputs, in
    FP8 in square blocks; blocks of all inputs are of one row.

    Every int32 is a valid word of eight 4-bit codes, so nothing is quantised for them.
    """
    device = generator.device

    def scales(rows: int, columns: int, std: float) -> torch.Tensor:
        return std * (0.8 + 0.4 * torch.rand(rows, columns, generator=generator, device=device))

    groups = math.ceil(inputs / group_rows)
    if method == "fp8":
        down = outputs if group_rows == inputs else math.ceil(outputs / group_rows)
        weight = torch.randn(outputs, inputs, generator=generator, device=device).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale_inv": scales(down, groups, _std(inputs))}
    found = {"scales": scales(groups, outputs, _std(inputs) / _CODES_STD).half()}
    found["qzeros"] = random_words(groups, outputs // 8, generator)
    if method == "awq":
        return found | {"qweight": random_words(inputs, outputs // 8, generator)}
    order = torch.arange(inputs, device=device, dtype=torch.int32) // group_rows
    if method == "gptq-act-order":
        order = order[torch.randperm(inputs, generator=generator, device=device)]
    return found | {"qweight": random_words(inputs // 8, outputs, generator), "g_idx": order}


def weights_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def checks(place: Place) -> Iterable[Row]:
    """Make every model now, so that no later part's time goes into it."""
    made: list[tuple[str, Callable[[], Path]]] = [
        ("tiny EXL2, all widths", partial(exl2_model, place, TINY)),
        ("tiny float32", partial(plain_model, place, TINY, "float32")),
        ("1B EXL2", partial(exl2_model, place, BILLION)),
        ("1B bfloat16", partial(plain_model, place, BILLION, "bfloat16")),
    ]
    for name, make in made:
        yield from attempt(name, partial(_made, name, make))


def _made(name: str, make: Callable[[], Path]) -> list[Row]:
    return [measured(name, weights_bytes(make()) / 2**20, "MiB")]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _packing(method: Method, group_rows: int) -> dict[str, Any]:
    """quantization_config as AutoGPTQ, AutoAWQ and DeepSeek write it."""
    if method == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }
    of_four = {"bits": 4, "group_size": group_rows}
    if method == "awq":
        skipped = {"modules_to_not_convert": ["lm_head"]}
        return of_four | {"quant_method": "awq", "zero_point": True, "version": "gemm"} | skipped
    return of_four | {"quant_method": "gptq", "desc_act": method == "gptq-act-order", "sym": False}


def _packed_tensors(config: dict[str, Any], method: Method, group_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(_device()).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in tensor_shapes(config).items():
        if len(size) == 1 or name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = _plain(name, size, torch.float16, generator)
            continue
        outputs, inputs = size
        packed = packed_tensors(method, inputs, outputs, _FP8_BLOCK if method == "fp8" else group_rows, generator)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.cpu() for part, tensor in packed.items()}
    return tensors


def _exl2_tensors(shape: Shape, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator(_device()).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in tensor_shapes(config).items():
        if len(size) == 1 or name == "model.embed_tokens.weight":
            tensors[name] = _plain(name, size, torch.float16, generator)
            continue
        out_features, in_features = size
        groups = plan_groups(in_features, shape.widths, shape.group_rows)
        packed = random_exl2(in_features, out_features, groups, std=_std(in_features), generator=generator)
        key = name.removesuffix(".weight")
        tensors |= {f"{key}.{part}": tensor.cpu() for part, tensor in packed.items()}
    return tensors


def _exl3_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, size) in enumerate(tensor_shapes(config).items()):
        if len(size) == 1 or name == "model.embed_tokens.weight":
            tensors[name] = _plain(name, size, torch.float16, generator)
            continue
        out_features, in_features = size
        scale = _std(in_features) / _EXL3_STD
        packed = random_exl3(in_features, out_features, 4, codebook="mcg", seed=seed, scale=scale)
        key = name.removesuffix(".weight")
        tensors |= {f"{key}.{part}": tensor for part, tensor in packed.items()}
    return tensors


def _plain_tensors(config: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return {name: _plain(name, size, dtype, generator) for name, size in tensor_shapes(config).items()}


def _plain(name: str, size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(size, generator=generator, device=generator.device)
    if len(size) == 1:
        values = 1.0 + 0.1 * values
    elif name != "model.embed_tokens.weight":
        values *= _std(size[1])
    return values.to(dtype).cpu().contiguous()


def _std(in_features: int) -> float:
    """Keeps activations of about one size through the layers, with logits that differ clearly."""
    return 1.5 / math.sqrt(in_features)


def _write(folder: Path, shape: Shape, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS_TOKEN_IDS)}))
    write_tokenizer(folder, vocab_size=_SMALL_VOCAB)
    _fill_vocabulary(folder / "tokenizer.json", shape.vocab)
    save_file(tensors, folder / "output.safetensors", metadata={"format": "pt"})
    (folder / _DONE).touch()


def _fill_vocabulary(file: Path, size: int) -> None:
    """Give every id up to `size` a piece: random weights choose any id, and the library looks each one up."""
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), size):
        vocabulary[f"t{token_id}"] = token_id
    file.write_text(json.dumps(tokenizer))
