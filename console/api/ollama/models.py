"""What Ollama's clients ask of models: /api/tags, /api/show, /api/ps, /api/version; and what only Ollama does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, TypeVar

import msgspec
from aiohttp import web

from console.api.body import Body, read
from console.api.context import ApiContext
from console.api.described import describes
from console.api.errors import json_response
from console.api.models import ANSWERING
from console.api.ollama.body import LATEST
from console.api.ollama.catalog import Listed, Running, Shown, listed, running, shown
from console.api.parameters import OLLAMA_REFUSED
from console.api.versions import product_version
from engine.errors import InvalidRequest, ModelNotFound
from engine.snapshot import ModelReading

T = TypeVar("T")

_NOT_HERE = {
    "/api/pull": "the operator loads models, also those of the hub: in the console, or with POST /admin/load",
    "/api/push": "this server uploads no models",
    "/api/create": "this server makes no models: load a folder with safetensors",
    "/api/copy": "this server copies no models",
    "/api/delete": "this server deletes no models; the operator unloads them with POST /admin/unload",
    "/api/blobs/{digest}": "this server takes no files",
}


class ListedModels(msgspec.Struct, frozen=True):
    """Those that answer."""

    models: list[Listed]


class RunningModels(msgspec.Struct, frozen=True):
    """Those that are in memory."""

    models: list[Running]


class Version(msgspec.Struct, frozen=True):
    """This server's own."""

    version: str


class ShowBody(Body):
    """What /api/show takes. name: an older name of `model`.  verbose: there is nothing more to show."""

    refused = OLLAMA_REFUSED
    inert = frozenset({"verbose", "options", "system"})
    aliases: ClassVar[Mapping[str, str]] = {"name": "model"}

    model: str


class ModelList:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/api/tags", self._tags),
            web.get("/api/ps", self._ps),
            web.get("/api/version", self._version),
            web.post("/api/show", self._show),
            *(web.post(path, _refuse) for path in _NOT_HERE if path != "/api/delete"),
            web.delete("/api/delete", _refuse),
        ]

    @describes("List the models that answer", answer=ListedModels)
    async def _tags(self, request: web.Request) -> web.Response:
        return json_response(ListedModels(await self._each(listed, ANSWERING)))

    @describes("List the models in memory", answer=RunningModels)
    async def _ps(self, request: web.Request) -> web.Response:
        describe = partial(running, now=datetime.now(UTC))
        return json_response(RunningModels(await self._each(describe, ("ready",))))

    @describes("Tell this server's version", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(product_version()))

    @describes("Tell all about a model", body=ShowBody, answer=Shown)
    async def _show(self, request: web.Request) -> web.Response:
        body = await read(request, ShowBody)
        readings = self._readings(ANSWERING)
        reading = readings.get(body.model) or readings.get(body.model + LATEST)
        if reading is None:
            known = ", ".join(readings)
            raise ModelNotFound(
                f"There is no model {body.model!r} here; available: {known or 'none'}",
                param="model",
                model=body.model,
                available=known,
            )
        return json_response(
            await asyncio.to_thread(shown, reading, body.model, self._context.engine.tokenizer_of(reading.name))
        )

    def _readings(self, states: Sequence[str]) -> dict[str, ModelReading]:
        """Models and their adapters by the names that they are listed under, with a tag as all names of Ollama's."""
        found: dict[str, ModelReading] = {}
        for reading in self._context.engine.published.models:
            if reading.status.state in states and reading.status.spec is not None:
                for name in (reading.name, *(adapter.name for adapter in reading.adapters)):
                    found.setdefault(name if ":" in name else name + LATEST, reading)
        return found

    async def _each(self, describe: Callable[[ModelReading, str], T], states: Sequence[str]) -> list[T]:
        """Of each model. Their files are read beside the event loop."""
        readings = self._readings(states)
        return await asyncio.to_thread(lambda: [describe(reading, name) for name, reading in readings.items()])


@describes("What only Ollama does; always a 400 that says why", success=None)
async def _refuse(request: web.Request) -> web.StreamResponse:
    """What only Ollama does."""
    resource = request.match_info.route.resource
    why = "" if resource is None else _NOT_HERE[resource.canonical]
    raise InvalidRequest(f"{request.path} is not supported: {why}")
