"""A model on this machine, as measurements load it: its configuration and the CPU threads it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from console.runtime.loading import local_folder, model_spec
from console.settings.sources import load_settings
from engine.config import ModelSpec
from engine.devices import usable_cores
from engine.errors import UnsupportedModel
from engine.models.files import read_json_object


@dataclass(frozen=True, slots=True)
class LocalModel:
    """name: as the user wrote it.  spec: without threads and KV pages.  threads: of all workers together."""

    name: str
    spec: ModelSpec
    vocab_size: int
    threads: int


def local_model(name: str, *, threads: int | None, changes: Mapping[str, Any] = MappingProxyType({})) -> LocalModel:
    """Find a model. threads: the machine's cores where None.  changes: settings of its load, which override environment
    variables and config.toml.

    Raises ModelNotFound, UnsupportedModel or another EngineError.
    """
    settings = load_settings({"model": name, **changes})
    path = local_folder(settings)
    spec = model_spec(settings, name, path)
    vocab_size = read_json_object(path / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UnsupportedModel(f"config.json of {spec.name} does not give the model's vocab_size")
    return LocalModel(name, spec, vocab_size, threads or usable_cores())
