"""Synthetic model folders: small ones to compare bits, and the shape of about 1B parameters to measure speed."""

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

from tests.fakes.tiny_models import EOS_TOKEN_IDS, tensor_shapes, tiny_config, write_tokenizer
from tests.gpu.exl2_random import WIDTHS, plan_groups, random_exl2
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, measured

_SMALL_VOCAB = 320
_DONE = "complete"


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
BILLION = Shape("1b", 2048, 8192, 16, 32, 8, 32000, 8192, (5, 4), 128)


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


def plain_model(place: Place, shape: Shape, dtype: str) -> Path:
    """The folder of `shape` with random weights in `dtype`, made at first use."""
    folder = place.models / f"{shape.name}-{dtype}"
    if not (folder / _DONE).exists():
        config = shape.config(dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _write(folder, shape, config, _plain_tensors(config, getattr(torch, dtype), device))
    return folder


PackedMethod = Literal["gptq", "awq", "fp8"]
_GROUP = 128


def packed_model(place: Place, shape: Shape, method: PackedMethod) -> Path:
    """The folder of `shape` with random weights in `method`, groups or blocks of 128, made at first use."""
    folder = place.models / f"{shape.name}-{method}"
    if not (folder / _DONE).exists():
        declared: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": _GROUP}
        if method == "fp8":
            declared = {"quant_method": method, "weight_block_size": [_GROUP, _GROUP]}
        config = shape.config("float16") | {"quantization_config": declared}
        generator = torch.Generator().manual_seed(1)
        tensors: dict[str, torch.Tensor] = {}
        for name, size in tensor_shapes(config).items():
            if len(size) == 1 or name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensors[name] = _plain(name, size, torch.float16, generator)
                continue
            packed = packed_tensors(method, size[1], size[0], _GROUP, generator)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
        _write(folder, shape, config, tensors)
    return folder


def packed_tensors(
    method: PackedMethod, inputs: int, outputs: int, size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Random tensors of a layer by their short names, in groups or square blocks of `size`; in FP8 of all inputs, a
    scale for each row. GPTQ is in another order than that of its groups."""
    groups = -(-inputs // size)
    if method == "fp8":
        down = outputs if size == inputs else -(-outputs // size)
        weight = torch.randn(outputs, inputs, generator=generator)
        scale = _std(inputs) * (0.5 + torch.rand(down, groups, generator=generator))
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    # Codes and zero points of any size differ by 6.5 in the mean square.
    scales = _std(inputs) / 6.5 * (0.5 + torch.rand(groups, outputs, generator=generator))
    tensors = {"qzeros": words(groups, outputs // 8), "scales": scales.half()}
    if method == "awq":
        return tensors | {"qweight": words(inputs, outputs // 8)}
    order = torch.randperm(inputs, generator=generator)
    return tensors | {"qweight": words(inputs // 8, outputs), "g_idx": (order // size).to(torch.int32)}


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


def _exl2_tensors(shape: Shape, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in tensor_shapes(config).items():
        if len(size) == 1 or name == "model.embed_tokens.weight":
            tensors[name] = _plain(name, size, torch.float16, generator)
            continue
        out_features, in_features = size
        groups = plan_groups(in_features, shape.widths, shape.group_rows)
        packed = random_exl2(in_features, out_features, groups, std=_std(in_features), generator=generator)
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
