"""What an operator may do over HTTP: load and unload models, turn their knobs, attach adapters, restart workers."""

from __future__ import annotations

import asyncio
import logging
import time
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from aiohttp import web
from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from console.api.admin.operator import Operator
from console.api.context import ApiContext
from console.api.http.errors import ErrorBody, InternalError, NotFound, envelope, json_response
from console.api.requests.body import Body, read
from console.api.requests.schemas import describes
from console.api.requests.stream import SSE, ChunkStream
from console.settings.load_options import LoadOptions, load_options, options_of, value_type
from console.settings.schema import Settings, flag_of
from engine.backends.base import LoadProgress
from engine.config import MAX_TIMEOUT_S
from engine.engine import Engine
from engine.errors import EngineBusy, EngineClosed, EngineError, InvalidRequest, LoadCancelled
from engine.placement.estimate import Estimate
from engine.snapshot import ModelReading, Snapshot

# What the admin endpoints take.

DRAIN_S = 30.0
MAX_NAME = 256

MAX_PATH = 4096
MAX_DEVICES = 64


class _LoadBody(Body):
    """A model to load, by a name as --model takes it; what is left out is as the settings and the knobs have it.

    name: clients' name of it, its own if empty.  beside: keep the models that are loaded.
    """

    aliases = MappingProxyType({flag.knob: name for name, _, flag in load_options() if flag.knob not in ("", name)})

    model: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    name: Annotated[str, Field(max_length=MAX_NAME)] = ""
    beside: bool = False

    @property
    def options(self) -> LoadOptions:
        """What the load sets of its own."""
        return options_of({name: tuple(value) if isinstance(value, list) else value for name, value in self})


def _option_field(setting: FieldInfo) -> Any:
    """Return a field that takes what a setting takes, within its bounds; null leaves the setting as it is."""
    kind: Any = value_type(setting)
    bounds: list[Any] = [each for each in setting.metadata if isinstance(each, Ge | Gt | Le | Lt)]
    if get_origin(kind) is tuple:
        item: Any = get_args(setting.annotation)[0]
        kind, bounds = list[item], [Len(0, MAX_DEVICES)]
    elif kind is str:
        bounds = [Len(1, MAX_PATH)]
    return Annotated[Annotated[kind, "", *bounds] | None, Field(description=f"{setting.description}.")], None


LoadBody: type[_LoadBody] = create_model(
    "LoadBody",
    __base__=_LoadBody,
    __doc__=_LoadBody.__doc__,
    **{name: _option_field(field) for name, field, _ in load_options()},
)


class UnloadBody(Body):
    """model: the first where empty.  drain_seconds: how long its running requests may go on."""

    model: str = ""
    drain_seconds: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)] = DRAIN_S


_LIVE_KNOBS = ("num_workers", "max_prompts", "idle_unload")


class _ReconfigureBody(Body):
    """model: the first where empty. What is left out is not changed."""

    rules = (
        {
            "anyOf": [
                {"required": [name], "properties": {name: {"type": "number"}}}
                for name in (flag_of(knob).knob for knob in _LIVE_KNOBS)
            ]
        },
    )

    model: str = ""

    @property
    def knobs(self) -> dict[str, Any]:
        """What it changes."""
        return {name: value for name, value in self if name != "model" and value is not None}


ReconfigureBody: type[_ReconfigureBody] = create_model(
    "ReconfigureBody",
    __base__=_ReconfigureBody,
    __doc__=_ReconfigureBody.__doc__,
    **{flag_of(name).knob: _option_field(Settings.model_fields[name]) for name in _LIVE_KNOBS},
)


class AdapterBody(Body):
    """name: what requests call it.  path: its folder, or its name as it is found in the models folders."""

    model: str = ""
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0


# A load that was asked for over HTTP: it goes on when its client leaves, and can be looked at until the next one.

log = logging.getLogger("api")

LOAD_PATH = "/admin/load"


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a load stands. progress: of the download, or of the slowest worker.  asked_at: unix time.  see: where this
    can be asked for again."""

    model: str
    state: Literal["loading", "ready", "failed", "cancelled"]
    asked_at: float
    progress: LoadProgress | None = None
    error: ErrorBody | None = None
    see: str = LOAD_PATH


class LoadJob:
    """One load, from its order to its end."""

    def __init__(self, order: _LoadBody, engine: Engine, operator: Operator) -> None:
        self._order = order
        self._engine = engine
        self._operator = operator
        self._asked_at = time.time()
        self._work = asyncio.get_running_loop().create_task(self._run())

    @property
    def ended(self) -> bool:
        """Whether it is ready or has failed."""
        return self._work.done()

    @property
    def error(self) -> EngineError | None:
        """Why it failed, once it has."""
        return self._work.result() if self._work.done() else None

    async def wait(self, timeout_s: float) -> None:
        """Return when it has ended, after `timeout_s` at the latest."""
        await asyncio.wait((self._work,), timeout=timeout_s)

    def report(self) -> LoadReport:
        """How it stands now."""
        state: Literal["loading", "ready", "failed", "cancelled"] = "loading"
        error = self.error
        if error is not None:
            state = "cancelled" if isinstance(error, LoadCancelled) else "failed"
        elif self.ended:
            state = "ready"
        return LoadReport(
            model=self._order.model,
            state=state,
            asked_at=self._asked_at,
            progress=self._progress() if state == "loading" else None,
            error=None if error is None else envelope(error).error,
        )

    async def _run(self) -> EngineError | None:
        try:
            order = self._order
            await self._operator.load_model(order.model, order.options, name=order.name, beside=order.beside)
        except EngineError as error:
            return error
        except Exception:
            log.exception("the load of %s broke", self._order.model)
            return InternalError("The load broke; the server's log says why")
        return None

    def _progress(self) -> LoadProgress | None:
        download = self._operator.finding()
        if download is not None:
            return download.progress
        models = self._engine.models()
        return next((model.status.progress for model in models if model.status.state == "loading"), None)


class LoadJobs:
    """The loads of one server: one at a time."""

    def __init__(self, engine: Engine, operator: Operator) -> None:
        self._engine = engine
        self._operator = operator
        self.last: LoadJob | None = None

    def begin(self, order: _LoadBody) -> LoadJob:
        """Start a load. Raises EngineBusy while one is under way."""
        if self.last is not None and not self.last.ended:
            raise EngineBusy(f"{self.last.report().model} is being loaded; wait, or cancel that first", state="loading")
        self.last = LoadJob(order, self._engine, self._operator)
        return self.last


_REFUSAL_S = 0.5
"""Whatever forbids a load is known sooner; a load that goes on longer is told about where it can be looked at."""

_LOOK_S = 0.25
"""As often as the engine says how it is."""

_EMPTY = b"{}"


class AdminModels(msgspec.Struct, frozen=True, kw_only=True):
    """Every model that the engine holds. load: the one that was asked for last over HTTP."""

    models: tuple[ModelReading, ...]
    load: LoadReport | None


class Admin:
    """The endpoints. They answer when what was asked is done; a client that leaves before does not undo it."""

    def __init__(self, context: ApiContext, operator: Operator) -> None:
        self._context = context
        self._engine = context.engine
        self._operator = operator
        self._loads = LoadJobs(context.engine, operator)

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/admin/models", self._models),
            web.get("/admin/snapshot", self._snapshot),
            web.get(LOAD_PATH, self._last_load),
            web.post(LOAD_PATH, self._load),
            web.post("/admin/cancel-load", self._cancel_load),
            web.post("/admin/estimate", self._estimate),
            web.post("/admin/unload", self._unload),
            web.post("/admin/reconfigure", self._reconfigure),
            web.post("/admin/adapters", self._attach),
            web.delete("/admin/adapters/{name:.+}", self._detach),
            web.post("/admin/workers/{id}/restart", self._restart),
        ]

    @describes("The models that the engine holds", answer=AdminModels, group="admin")
    async def _models(self, request: web.Request) -> web.Response:
        return self._overview()

    @describes("All that the console shows", answer=Snapshot, group="admin")
    async def _snapshot(self, request: web.Request) -> web.Response:
        return json_response(self._engine.snapshot())

    @describes("The load that was asked for last", answer=LoadReport, group="admin")
    async def _last_load(self, request: web.Request) -> web.Response:
        if self._loads.last is None:
            raise NotFound("No load was asked for yet")
        return json_response(self._loads.last.report())

    @describes(
        "Load a model; goes on where its client leaves. With Accept: text/event-stream, how it stands until it ends",
        body=LoadBody,
        answer=LoadReport,
        event=LoadReport,
        group="admin",
    )
    async def _load(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, LoadBody)
        load = self._loads.begin(body)
        await load.wait(_REFUSAL_S)
        if load.error is not None:
            raise load.error
        if SSE.content_type in request.headers.get("Accept", ""):
            async with ChunkStream(request, self._context.settings) as chunks:
                await self._follow(load, chunks)
            return chunks.response
        response = json_response(load.report(), status=200 if load.ended else 202)
        response.headers["Location"] = LOAD_PATH
        return response

    async def _follow(self, load: LoadJob, chunks: ChunkStream) -> None:
        """Send how a load stands whenever that changes, to its end."""
        sent: LoadReport | None = None
        while not load.ended:
            if self._context.traffic.closing:
                raise EngineClosed("The server is stopping")
            if (report := load.report()) != sent:
                await chunks.send(report)
                sent = report
            await load.wait(_LOOK_S)
        if load.error is not None:
            raise load.error
        await chunks.send(load.report())

    @describes("What a load would take of each device", body=LoadBody, answer=Estimate, group="admin")
    async def _estimate(self, request: web.Request) -> web.Response:
        body = await read(request, LoadBody)
        found = await self._operator.estimate(body.model, body.options, beside=body.beside)
        return json_response({"can_load": found.can_load, **msgspec.structs.asdict(found)})

    @describes("Stop the load under way", answer=AdminModels, group="admin")
    async def _cancel_load(self, request: web.Request) -> web.Response:
        await self._operator.cancel_load()
        return self._overview()

    @describes("Unload a model", body=UnloadBody, optional=True, answer=AdminModels, group="admin")
    async def _unload(self, request: web.Request) -> web.Response:
        body = await read(request, UnloadBody, absent=_EMPTY)
        await self._engine.unload(body.model, body.drain_seconds)
        return self._overview()

    @describes("Turn a model's knobs while it serves", body=ReconfigureBody, answer=AdminModels, group="admin")
    async def _reconfigure(self, request: web.Request) -> web.Response:
        body = await read(request, ReconfigureBody)
        if not body.knobs:
            raise InvalidRequest("Nothing to change: send workers, max_prompts or idle_unload_s")
        await self._engine.reconfigure(model=body.model, **body.knobs)
        return self._overview()

    @describes("Attach an adapter to a model", body=AdapterBody, answer=AdminModels, group="admin")
    async def _attach(self, request: web.Request) -> web.Response:
        body = await read(request, AdapterBody)
        await self._engine.attach(await self._operator.find_adapter(body.name, body.path, body.scale), body.model)
        return self._overview()

    @describes(
        "Detach an adapter",
        query={"model": "whose; the first model's where it is left out"},
        answer=AdminModels,
        group="admin",
    )
    async def _detach(self, request: web.Request) -> web.Response:
        await self._engine.detach(request.match_info["name"], request.query.get("model", ""))
        return self._overview()

    @describes("Restart a worker", answer=AdminModels, group="admin")
    async def _restart(self, request: web.Request) -> web.Response:
        worker_id = request.match_info["id"]
        there = [worker.id for worker in self._engine.snapshot().workers]
        if worker_id not in there:
            raise NotFound(f"There is no worker {worker_id}; there are: {', '.join(there) or 'none'}")
        await self._engine.restart_worker(worker_id)
        return self._overview()

    def _overview(self) -> web.Response:
        last = self._loads.last
        load = None if last is None else last.report()
        return json_response(AdminModels(models=self._engine.models(), load=load))
