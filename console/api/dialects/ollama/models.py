"""Models as Ollama's clients see them: /api/tags, /api/show, /api/ps, /api/version; and endpoints that are refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.ollama.body import LATEST, REFUSED
from console.api.http.errors import json_response
from console.api.requests.body import Body, read
from console.api.requests.model_list import model_not_found
from console.api.requests.schemas import describes
from console.api.tools.formats import format_of as tool_format_of
from console.api.version import product_version
from engine.errors import EngineError, InvalidRequest
from engine.models.catalog import ModelEntry, is_count
from engine.models.config_json import read_config
from engine.models.files import file_names
from engine.models.gguf.file import is_gguf, split_files
from engine.models.inspect import inspect
from engine.snapshot import ModelReading
from engine.text.thinking import format_of as thinking_format_of
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import TokenizerFolder

# Models as Ollama describes them, from their folders and the engine.

FOREVER = "9999-12-31T23:59:59Z"
"""`expires_at` of a model that is never unloaded."""

_SHAPE = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Ollama's names of fields of config.json."""

_LAST_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""The latest time that can be written; the times of files may be later."""

_UNKNOWN = "unknown"
"""The family of a model whose config names none."""

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and size of a model."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a list. digest: changes when its weights do."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory. expires_at: when it is unloaded unless a request comes.  size: in all memory.

    size_vram: in GPU memory.
    """

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a model. template: its chat template, in Jinja.  parameters: recommended by its makers."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, object]
    capabilities: list[str]
    modified_at: str


def list_models(reading: ModelReading, name: str) -> ListedModel:
    """Return a model for a list. Blocking: reads its folder's headers."""
    folder = _folder(reading)
    entry = inspect(folder)
    modified_at, digest = _stamp(folder)
    loaded = reading.status.model
    size = entry.weights_bytes or (0 if loaded is None else loaded.weights_bytes)
    return ListedModel(
        name=name, model=name, modified_at=modified_at, size=size, digest=digest, details=_details(reading, entry)
    )


def list_running(reading: ModelReading, name: str, now: datetime) -> RunningModel:
    """Return a model that is in memory. Blocking: reads its folder's headers."""
    folder, loaded = _folder(reading), reading.status.model
    shares = reading.used or (() if loaded is None else loaded.shares)
    workers = max(1, reading.target_workers)
    gpus = sum(share.total_bytes for share in shares if share.device.startswith("cuda"))
    expires = now + timedelta(seconds=reading.idle_unload_s)
    return RunningModel(
        name=name,
        model=name,
        size=workers * sum(share.total_bytes for share in shares),
        digest=_stamp(folder)[1],
        details=_details(reading, inspect(folder)),
        expires_at=_written(expires) if reading.idle_unload_s else FOREVER,
        size_vram=workers * gpus,
        context_length=0 if loaded is None else loaded.max_model_len,
    )


def show_model(reading: ModelReading, name: str, tokenizer: Tokenizer | None) -> ModelDetails:
    """Return the details of a model. tokenizer: its own, None for one that is not loaded, whose folder has it.
    Blocking: reads its folder's files."""
    folder = _folder(reading)
    entry, parameters = inspect(folder), _parameters(folder)
    modified_at, digest = _stamp(folder)
    thinking = "auto" if reading.status.spec is None else reading.status.spec.thinking
    templates = _tokenizer_folder(folder).chat_templates()
    template = templates.get("default", next(iter(templates.values()), ""))
    lines = [f"FROM {name}", *(f"PARAMETER {line}" for line in parameters.splitlines())]
    return ModelDetails(
        modelfile="\n".join(lines),
        parameters=parameters,
        template=template,
        details=_details(reading, entry),
        model_info=_model_info(folder, entry, reading),
        capabilities=[
            "completion",
            *(_abilities_in(folder, digest, thinking) if tokenizer is None else _abilities(tokenizer, thinking)),
        ],
        modified_at=modified_at,
    )


def _abilities(tokenizer: Tokenizer, thinking: str) -> Sequence[str]:
    """Return what a model can do besides completion, in Ollama's words. thinking: as in ModelSpec."""
    return [
        *(["tools"] if tool_format_of(tokenizer) is not None else []),
        *(["thinking"] if thinking_format_of(tokenizer, thinking) is not None else []),
    ]


@lru_cache(maxsize=256)
def _abilities_in(folder: Path, digest: str, thinking: str) -> Sequence[str]:
    """Return those of the model in a folder whose files have this digest; none where it has no readable tokenizer."""
    try:
        return _abilities(Tokenizer.from_folder(folder), thinking)
    except EngineError:
        return ()


def _folder(reading: ModelReading) -> Path:
    assert reading.status.spec is not None, "a model that answers has a spec"
    return reading.status.spec.path


def _details(reading: ModelReading, entry: ModelEntry) -> Details:
    family = entry.model_type or _UNKNOWN
    return Details(
        format="gguf" if is_gguf(_folder(reading)) else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short_number(_parameter_count(reading, entry)),
        quantization_level=(entry.quantisation or entry.dtype).upper(),
    )


def _model_info(folder: Path, entry: ModelEntry, reading: ModelReading) -> dict[str, object]:
    config, family = _config(folder), entry.model_type or _UNKNOWN
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
    """Return the recommended sampling parameters, a line each."""
    try:
        defaults = _tokenizer_folder(folder).generation_defaults()
    except EngineError:
        return ""
    recommended = {name: getattr(defaults, name) for name in _PARAMETERS if getattr(defaults, name) is not None}
    return "\n".join(f"{name.replace('repetition', 'repeat')} {value}" for name, value in recommended.items())


def _config(folder: Path) -> Mapping[str, object]:
    """Return config.json, its text part where it has several; {} where it cannot be read."""
    try:
        config = read_config(folder)
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
    """Return when the model's files changed last, and a digest of their names, sizes and times."""
    stats = list(_stats(folder))
    digest = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode())
    latest = max((stat.st_mtime for _, stat in stats), default=0.0)
    return _written(datetime.fromtimestamp(min(max(latest, 0.0), _LAST_S), UTC)), digest.hexdigest()


def _stats(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the model's files by name, without broken links."""
    if is_gguf(folder):
        with suppress(OSError, EngineError):
            yield from ((file.name, file.stat()) for file in split_files(folder))
        return
    try:
        names = file_names(folder)
    except (OSError, EngineError):
        return
    for name in names:
        if name.endswith((".json", ".safetensors")):
            with suppress(OSError):
                yield name, (folder / name).stat()


def _short_number(parameters: int) -> str:
    """ "7.2B", "135M"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.4g}{unit}"
    return str(parameters)


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


T = TypeVar("T", ListedModel, RunningModel)

_REFUSED_PATHS = {
    "/api/pull": "only the operator loads models: in the console, or with POST /admin/load",
    "/api/push": "uploads are not supported",
    "/api/create": "models cannot be created here; load a folder with safetensors",
    "/api/copy": "models cannot be copied",
    "/api/delete": "models cannot be deleted; the operator unloads them with POST /admin/unload",
    "/api/blobs/{digest}": "file uploads are not supported",
}


class ListedModels(msgspec.Struct, frozen=True):
    """The models that answer."""

    models: list[ListedModel]


class RunningModels(msgspec.Struct, frozen=True):
    """The models in memory."""

    models: list[RunningModel]


class Version(msgspec.Struct, frozen=True):
    """This server's version."""

    version: str


class ShowBody(Body):
    """A request for a model's details. name: an older name of `model`."""

    refused = REFUSED
    inert = frozenset({"verbose", "options", "system"})
    aliases: ClassVar[Mapping[str, str]] = {"name": "model"}

    model: str


class ModelList:
    """The endpoints about models."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.get("/api/tags", self._tags),
            web.get("/api/ps", self._ps),
            web.get("/api/version", self._version),
            web.post("/api/show", self._show),
            *(web.post(path, _refuse) for path in _REFUSED_PATHS if path != "/api/delete"),
            web.delete("/api/delete", _refuse),
        ]

    @describes("List models that answer or can be loaded", answer=ListedModels)
    async def _tags(self, request: web.Request) -> web.Response:
        return json_response(ListedModels(await _each(list_models, await self._context.models_for(request).readings())))

    @describes("List models in memory", answer=RunningModels)
    async def _ps(self, request: web.Request) -> web.Response:
        describe = partial(list_running, now=datetime.now(UTC))
        models = self._context.models_for(request).answering()
        ready = [model for model in models if model.status.state == "ready"]
        return json_response(RunningModels(await _each(describe, ready)))

    @describes("Version of the server", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(product_version()))

    @describes("Details of a model", body=ShowBody, answer=ModelDetails)
    async def _show(self, request: web.Request) -> web.Response:
        body = await read(request, ShowBody)
        readings = _by_name(await self._context.models_for(request).readings())
        reading = readings.get(body.model) or readings.get(body.model + LATEST)
        if reading is None:
            raise model_not_found(body.model, readings)
        return json_response(
            await asyncio.to_thread(show_model, reading, body.model, self._context.engine.tokenizer_of(reading.name))
        )


def _by_name(readings: Sequence[ModelReading]) -> dict[str, ModelReading]:
    """Return models, their aliases and adapters by their names in lists, which have a tag, as all of Ollama's."""
    found: dict[str, ModelReading] = {}
    for reading in readings:
        if (spec := reading.status.spec) is not None:
            for name in (reading.name, *spec.aliases, *(adapter.name for adapter in reading.adapters)):
                found.setdefault(name if ":" in name else name + LATEST, reading)
    return found


async def _each(describe: Callable[[ModelReading, str], T], readings: Sequence[ModelReading]) -> list[T]:
    """Describe each model by all of its names, in a thread: it reads their files, once for each."""
    return await asyncio.to_thread(lambda: list(_describe_each(describe, readings)))


def _describe_each(describe: Callable[[ModelReading, str], T], readings: Sequence[ModelReading]) -> Iterator[T]:
    described: dict[str, T] = {}
    for name, reading in _by_name(readings).items():
        if reading.name not in described:
            described[reading.name] = describe(reading, name)
        yield msgspec.structs.replace(described[reading.name], name=name, model=name)


@describes("Not supported (always 400)", success=None)
async def _refuse(request: web.Request) -> web.StreamResponse:
    """Refuse an operation that only Ollama has."""
    resource = request.match_info.route.resource
    why = "" if resource is None else _REFUSED_PATHS[resource.canonical]
    raise InvalidRequest(f"{request.path} is not supported: {why}")
