"""Models as Ollama's clients see them: /api/tags, /api/show, /api/ps, /api/version; and endpoints that are refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.ollama.body import LATEST, REFUSED
from console.api.http.errors import json_response
from console.api.requests.body import Body, read
from console.api.requests.model_list import ANSWERING, model_not_found
from console.api.requests.schemas import describes
from console.api.tools.formats import format_of as tool_format_of
from console.api.version import product_version
from engine.config import quote_value
from engine.errors import EngineError, InvalidRequest
from engine.models.catalog import ModelEntry, is_count
from engine.models.files import file_names, read_json_object
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

_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Kind and size of a model."""

    parent_model: str = ""
    format: str = "safetensors"
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
    """Return the details of a model. tokenizer: its own, while it is loaded. Blocking: reads its folder's files."""
    folder = _folder(reading)
    entry, parameters = inspect(folder), _parameters(folder)
    templates = _tokenizer_folder(folder).chat_templates()
    template = templates.get("default", next(iter(templates.values()), ""))
    lines = [f"FROM {name}", *(f"PARAMETER {line}" for line in parameters.splitlines())]
    return ModelDetails(
        modelfile="\n".join(lines),
        parameters=parameters,
        template=template,
        details=_details(reading, entry),
        model_info=_model_info(folder, entry, reading),
        capabilities=_capabilities(reading, tokenizer),
        modified_at=_stamp(folder)[0],
    )


def _capabilities(reading: ModelReading, tokenizer: Tokenizer | None) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    can = ["completion"]
    if tokenizer is not None and reading.status.spec is not None:
        can += ["tools"] if tool_format_of(tokenizer) is not None else []
        can += ["thinking"] if thinking_format_of(tokenizer, reading.status.spec.thinking) is not None else []
    return can


def _folder(reading: ModelReading) -> Path:
    assert reading.status.spec is not None, "a model that answers has a spec"
    return reading.status.spec.path


def _details(reading: ModelReading, entry: ModelEntry) -> Details:
    family = _family(_config(_folder(reading)))
    return Details(
        family=family,
        families=[family],
        parameter_size=_short_number(_parameter_count(reading, entry)),
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
    """Return the recommended sampling parameters, a line each."""
    try:
        defaults = _tokenizer_folder(folder).generation_defaults()
    except EngineError:
        return ""
    recommended = {name: getattr(defaults, name) for name in _PARAMETERS if getattr(defaults, name) is not None}
    return "\n".join(f"{name.replace('repetition', 'repeat')} {value}" for name, value in recommended.items())


def _family(config: Mapping[str, object]) -> str:
    return quote_value(config.get("model_type") or "unknown")


def _config(folder: Path) -> Mapping[str, object]:
    """Return config.json, its text part where it has several; {} where it cannot be read."""
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
    """Return when the model's files changed last, and a digest of their names, sizes and times."""
    stats = list(_stats(folder))
    digest = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode())
    latest = max((stat.st_mtime for _, stat in stats), default=0.0)
    return _written(datetime.fromtimestamp(min(max(latest, 0.0), _LAST_S), UTC)), digest.hexdigest()


def _stats(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the model's files by name, without broken links."""
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


T = TypeVar("T")

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

    @describes("List models ready to answer", answer=ListedModels)
    async def _tags(self, request: web.Request) -> web.Response:
        return json_response(ListedModels(await self._each(list_models, ANSWERING)))

    @describes("List models in memory", answer=RunningModels)
    async def _ps(self, request: web.Request) -> web.Response:
        describe = partial(list_running, now=datetime.now(UTC))
        return json_response(RunningModels(await self._each(describe, ("ready",))))

    @describes("Version of the server", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(product_version()))

    @describes("Details of a model", body=ShowBody, answer=ModelDetails)
    async def _show(self, request: web.Request) -> web.Response:
        body = await read(request, ShowBody)
        readings = self._readings(ANSWERING)
        reading = readings.get(body.model) or readings.get(body.model + LATEST)
        if reading is None:
            raise model_not_found(body.model, readings)
        return json_response(
            await asyncio.to_thread(show_model, reading, body.model, self._context.engine.tokenizer_of(reading.name))
        )

    def _readings(self, states: Sequence[str]) -> dict[str, ModelReading]:
        """Return models and their adapters by their names in lists, which have a tag, as all of Ollama's."""
        found: dict[str, ModelReading] = {}
        for reading in self._context.engine.models():
            if reading.status.state in states and reading.status.spec is not None:
                for name in (reading.name, *(adapter.name for adapter in reading.adapters)):
                    found.setdefault(name if ":" in name else name + LATEST, reading)
        return found

    async def _each(self, describe: Callable[[ModelReading, str], T], states: Sequence[str]) -> list[T]:
        """Describe each model, in a thread: it reads their files."""
        readings = self._readings(states)
        return await asyncio.to_thread(lambda: [describe(reading, name) for name, reading in readings.items()])


@describes("Not supported (always 400)", success=None)
async def _refuse(request: web.Request) -> web.StreamResponse:
    """Refuse an operation that only Ollama has."""
    resource = request.match_info.route.resource
    why = "" if resource is None else _REFUSED_PATHS[resource.canonical]
    raise InvalidRequest(f"{request.path} is not supported: {why}")
