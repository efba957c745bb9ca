"""Models as Ollama describes them: what their folders say, and where they are now."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from console.api.tools.formats import format_of
from engine.config import quoted
from engine.errors import EngineError
from engine.models.catalog import ModelEntry, is_count
from engine.models.files import file_names, read_json_object
from engine.models.inspect import inspect
from engine.snapshot import ModelReading
from engine.text.folder import TokenizerFolder
from engine.text.tokenizer import Tokenizer

FOREVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that never is."""

_SHAPE = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Ollama's names for what config.json says."""

_LAST_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The latest day that can be written; a file may say that it changed later."""

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a list. digest: changes when its weights do."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory. expires_at: when it is unloaded, should no request come.  size: in all memory; size_vram: in
    that of GPUs."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """All about a model. template: its chat template, which is Jinja here.  parameters: what its makers recommend."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


def listed(reading: ModelReading, name: str) -> Listed:
    """A model, as a list has it. Blocking: reads its folder's headers."""
    folder = _folder(reading)
    entry = inspect(folder)
    modified_at, digest = _stamp(folder)
    loaded = reading.status.model
    size = entry.weights_bytes or (0 if loaded is None else loaded.weights_bytes)
    return Listed(
        name=name, model=name, modified_at=modified_at, size=size, digest=digest, details=_details(reading, entry)
    )


def running(reading: ModelReading, name: str, now: datetime) -> Running:
    """A model that is in memory. Blocking: reads its folder's headers."""
    folder, loaded = _folder(reading), reading.status.model
    shares = reading.used or (() if loaded is None else loaded.shares)
    workers = max(1, reading.target_workers)
    gpus = sum(share.total_bytes for share in shares if share.device.startswith("cuda"))
    expires = now + timedelta(seconds=reading.idle_unload_s)
    return Running(
        name=name,
        model=name,
        size=workers * sum(share.total_bytes for share in shares),
        digest=_stamp(folder)[1],
        details=_details(reading, inspect(folder)),
        expires_at=_written(expires) if reading.idle_unload_s else FOREVER,
        size_vram=workers * gpus,
        context_length=0 if loaded is None else loaded.max_model_len,
    )


def shown(reading: ModelReading, name: str, tokenizer: Tokenizer | None) -> Shown:
    """All about a model. tokenizer: its own, while it is loaded. Blocking: reads its folder's files."""
    folder = _folder(reading)
    entry, parameters = inspect(folder), _parameters(folder)
    templates = _tokenizer_folder(folder).chat_templates()
    template = templates.get("default", next(iter(templates.values()), ""))
    can = ["completion"] if tokenizer is None or format_of(tokenizer) is None else ["completion", "tools"]
    lines = [f"FROM {name}", *(f"PARAMETER {line}" for line in parameters.splitlines())]
    return Shown(
        modelfile="\n".join(lines),
        parameters=parameters,
        template=template,
        details=_details(reading, entry),
        model_info=_model_info(folder, entry, reading),
        capabilities=can,
        modified_at=_stamp(folder)[0],
    )


def _folder(reading: ModelReading) -> Path:
    assert reading.status.spec is not None, "a model that answers has a spec"
    return reading.status.spec.path


def _details(reading: ModelReading, entry: ModelEntry) -> Details:
    family = _family(_config(_folder(reading)))
    return Details(
        family=family,
        families=[family],
        parameter_size=_in_words(_parameter_count(reading, entry)),
        quantization_level=(entry.quantisation or entry.dtype).upper(),
    )


def _model_info(folder: Path, entry: ModelEntry, reading: ModelReading) -> dict[str, object]:
    config = _config(folder)
    family = _family(config)
    numbers = {f"{family}.{name}": value for name, key in _SHAPE.items() if is_count(value := config.get(key))}
    return {
        "general.architecture": family,
        "general.parameter_count": _parameter_count(reading, entry),
        f"{family}.context_length": entry.context_tokens,
        **numbers,
    }


def _parameter_count(reading: ModelReading, entry: ModelEntry) -> int:
    return entry.parameters or (0 if reading.status.model is None else reading.status.model.parameters)


def _parameters(folder: Path) -> str:
    """The recommended sampling, a line each."""
    try:
        defaults = _tokenizer_folder(folder).generation_defaults()
    except EngineError:
        return ""
    given = {name: getattr(defaults, name) for name in _PARAMETERS if getattr(defaults, name) is not None}
    return "\n".join(f"{name.replace('repetition', 'repeat')} {value}" for name, value in given.items())


def _family(config: Mapping[str, object]) -> str:
    return quoted(config.get("model_type") or "unknown")


def _config(folder: Path) -> Mapping[str, object]:
    """config.json, the part on text where it has one for each kind of input; {} for one that cannot be read."""
    try:
        config = read_json_object(folder / "config.json")
    except EngineError:
        return {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _tokenizer_folder(folder: Path) -> TokenizerFolder:
    try:
        return TokenizerFolder.read(folder)
    except EngineError:
        return TokenizerFolder()


def _stamp(folder: Path) -> tuple[str, str]:
    """When the model's files changed last, and a digest of their names, sizes and times."""
    stats = list(_stats(folder))
    digest = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode())
    latest = max((stat.st_mtime for _, stat in stats), default=0.0)
    return _written(datetime.fromtimestamp(min(max(latest, 0.0), _LAST_S), UTC)), digest.hexdigest()


def _stats(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The model's files by name, without those that are not there behind their link."""
    try:
        names = file_names(folder)
    except (OSError, EngineError):
        return
    for name in names:
        if name.endswith((".json", ".safetensors")):
            with suppress(OSError):
                yield name, (folder / name).stat()


def _in_words(parameters: int) -> str:
    """ "7.2B", "135M"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.4g}{unit}"
    return str(parameters)


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
