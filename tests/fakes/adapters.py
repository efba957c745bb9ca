"""Random LoRA adapters in PEFT's folder layout, and the models that they would be if they were merged by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.tiny_models import tensor_shapes

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL_TARGETS = (*ATTENTION, *MLP)
STRENGTH = 0.5
"""How strong an adapter's change of a weight is beside the weight: enough for other tokens."""


@dataclass(frozen=True)
class MadeAdapter:
    """An adapter on disk. deltas: what it adds to each weight that it changes, by the weight's name."""

    folder: Path
    deltas: Mapping[str, Tensor]


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL_TARGETS,
    layers: Sequence[int] | None = None,
    rank_of: Callable[[str], int] | None = None,
    scale_of: Callable[[str], float] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = "base_model.model.",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> MadeAdapter:
    """Write a random adapter for the tiny model in `model`.

    rank_of, scale_of: what `config` makes of a module's rank and scale, where that is not `rank` and `alpha / rank`.
    shapes: of the model's tensors, where it is no tiny model.  config: any key of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = shapes or tensor_shapes(json.loads((model / "config.json").read_text()))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)) or (layers is not None and int(module.split(".")[2]) not in layers):
            continue
        its_rank = rank_of(module) if rank_of else rank
        scale = scale_of(module) if scale_of else alpha / its_rank
        a = torch.randn(its_rank, shape[1], generator=generator) * shape[1] ** -0.5
        b = torch.randn(shape[0], its_rank, generator=generator) * (STRENGTH / scale * its_rank**-0.5)
        a, b = a.to(dtype), b.to(dtype)
        tensors |= {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
        deltas[name] = scale * (b.float() @ a.float())
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_adapter_config(folder, r=rank, lora_alpha=alpha, **config)
    return MadeAdapter(folder, deltas)


def write_adapter_config(folder: Path, **config: Any) -> None:
    """Write adapter_config.json as PEFT does for a causal model; `config` overrides any key."""
    written = {
        "base_model_name_or_path": "tiny/model",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | config), encoding="utf-8")


def merge_by_hand(model: Path, adapter: MadeAdapter, folder: Path, strength: float = 1.0) -> Path:
    """The model that `model` is with `adapter` in its weights, `strength` times as strong, in `folder`."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    changed = {
        name: weights[name] + (strength * delta).to(weights[name].dtype) for name, delta in adapter.deltas.items()
    }
    save_file(weights | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
