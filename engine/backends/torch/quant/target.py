"""The folder that quantising makes: refused before the work begins, whole or not there afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from engine.errors import EngineError, InvalidRequest
from engine.models.files import is_folder, open_file

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".onnx", ".index.json")
_CONFIG = "config.json"


class QuantizeFailed(EngineError):
    """The model could not be quantised, or not be written; the message says why."""

    code: ClassVar[str] = "quantize_failed"


def check_target(target: Path, needed_bytes: int) -> None:
    """Raise InvalidRequest where `target` is taken or has nowhere to lie, QuantizeFailed where the disk is short."""
    try:
        is_taken = any(target.iterdir()) if is_folder(target) else os.path.lexists(target)
    except OSError:
        is_taken = True
    if is_taken:
        raise InvalidRequest(f"{target} exists and is not an empty folder; name a new one", param="target")
    if not is_folder(target.parent):
        raise InvalidRequest(f"{target} cannot be made: there is no folder {target.parent}", param="target")
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise QuantizeFailed(
            f"the disk is short: {target} needs up to {needed_bytes / 1e9:.2f} GB, "
            f"and {free_bytes / 1e9:.2f} GB are free",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A work folder beside `target` that becomes it in the end; on any error nothing is left."""
    work = target.with_name(f".{target.name}.quantising.{os.getpid()}")
    work.mkdir()
    try:
        yield work
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def companions(source: Path) -> list[Path]:
    """What belongs to a model beside its weights and config.json: tokenizer, chat template, licence."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_WEIGHTS)
        and file.name != _CONFIG
    ]


def copy_companions(source: Path, folder: Path) -> None:
    """Copy them. Raises UnsupportedModel for a link that leads out of `source`."""
    for file in companions(source):
        with open_file(file) as stream, (folder / file.name).open("xb") as copy:
            shutil.copyfileobj(stream, copy)


def write_config(config: Mapping[str, object], quantisation: Mapping[str, object], folder: Path) -> None:
    """config.json of the quantised model."""
    document = msgspec.json.encode({**config, "quantization_config": quantisation})
    (folder / _CONFIG).write_bytes(msgspec.json.format(document, indent=2) + b"\n")
