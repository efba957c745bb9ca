"""The config.json of a model: of its folder, or made of the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.errors import UnsupportedModel
from engine.models.files import read_json_object
from engine.models.gguf.file import GgufModel, is_gguf


def read_config(model: Path) -> Mapping[str, object]:
    """The config.json of a model; {} where its folder has none. Raises UnsupportedModel where it cannot be read,
    ModelLoadFailed for a damaged GGUF file."""
    if not is_gguf(model):
        return read_json_object(model / "config.json")
    try:
        return GgufModel(model).config
    except OSError as error:
        raise UnsupportedModel(f"{model} cannot be read: {error.strerror}") from error
