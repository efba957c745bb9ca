"""Loads of small folders with the fake library: short ways to start one and to look at what it made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.backends.base import LoadProgress
from engine.backends.exllama.generator_backend import LoadedParts
from engine.backends.exllamav2.library import Library
from engine.backends.exllamav2.loading import load_parts
from engine.config import ModelSpec
from tests.fakes.exllama_model import FakeConfig, FakeGpus, FakeModel, fake_library

LAYERS = 2


def load(
    folder: Path,
    gpus: FakeGpus,
    *,
    library: Library | None = None,
    max_prompts: int = 4,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> LoadedParts:
    """Load the model of a folder on these GPUs; settings: keys of a ModelSpec."""
    return load_parts(
        library or fake_library(gpus),
        ModelSpec(path=folder, name="tiny", **settings),
        max_prompts=max_prompts,
        report=report,
        cancelled=cancelled,
        gpus=gpus,
    )


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def models_of(gpus: FakeGpus, **changes: Any) -> tuple[list[FakeModel], Library]:
    """A library that remembers the models it makes, the main one first."""
    made: list[FakeModel] = []

    def make(config: FakeConfig) -> FakeModel:
        made.append(FakeModel(config, gpus))
        return made[-1]

    return made, fake_library(gpus, model=make, **changes)


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as they lie in the folder."""
    return load_file(folder / "model.safetensors")


def write_adapter(folder: Path, target: str = "model.layers.0.self_attn.q_proj", **config: Any) -> Path:
    """Write an adapter of zeros for one layer to `folder` and return it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config))
    names = [f"base_model.model.{target}.lora_{half}.weight" for half in "AB"]
    save_file({name: torch.zeros(8, 8) for name in names}, folder / "adapter_model.safetensors")
    return folder
