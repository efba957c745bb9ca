"""Endpoints of operators: load and unload models, change their knobs, attach adapters, restart workers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec
from aiohttp import web
from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from console.api.admin.calls import AdminOperations
from console.api.context import ApiContext
from console.api.http.errors import ErrorBody, InternalError, NotFound, envelope, json_response
from console.api.requests.body import Body, read
from console.api.requests.generation import id_of_choice
from console.api.requests.schemas import describes
from console.api.requests.stream import SSE, ChunkStream
from console.link.protocol import MAX_PATH
from console.link.rpc import CALLS, LOCAL_CALLS, Call, Route
from console.settings.load_options import LoadOptions, load_options, options_of, value_type
from console.settings.schema import fields
from engine.backends.base import LoadProgress
from engine.engine import Engine
from engine.errors import EngineBusy, EngineError, InvalidRequest, LoadCancelled, RequestNotFound
from engine.placement.estimate import Estimate
from engine.requests.causes import Why
from engine.requests.history import RequestDetail
from engine.snapshot import Alert, ModelReading, RequestRow

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

    def __init__(self, arguments: Mapping[str, Any], engine: Engine, operations: AdminOperations) -> None:
        self._model: str = arguments["model"]
        self._engine = engine
        self._operations = operations
        self._asked_at = time.time()
        self._work = asyncio.get_running_loop().create_task(self._run(arguments))

    @property
    def ended(self) -> bool:
        """True once it is ready or has failed."""
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
            model=self._model,
            state=state,
            asked_at=self._asked_at,
            progress=self._progress() if state == "loading" else None,
            error=None if error is None else envelope(error).error,
        )

    async def _run(self, arguments: Mapping[str, Any]) -> EngineError | None:
        try:
            await self._operations.carry_out(LOAD, arguments)
        except EngineError as error:
            return error
        except Exception:
            log.exception("the load of %s failed", self._model)
            return InternalError("The load failed; the server log has the cause")
        return None

    def _progress(self) -> LoadProgress | None:
        download = self._operations.link.models.fetching()
        if download is not None:
            return download.progress
        models = self._engine.models()
        return next((model.status.progress for model in models if model.status.state == "loading"), None)


class LoadJobs:
    """The loads of one server: one at a time."""

    def __init__(self, engine: Engine, operations: AdminOperations) -> None:
        self._engine = engine
        self._operations = operations
        self.last: LoadJob | None = None

    def begin(self, arguments: Mapping[str, Any]) -> LoadJob:
        """Start a load. Raises EngineBusy while one is under way."""
        if self.last is not None and not self.last.ended:
            raise EngineBusy(f"{self.last.report().model} is loading; wait, or cancel the load", state="loading")
        self.last = LoadJob(arguments, self._engine, self._operations)
        return self.last


_REFUSAL_S = 0.5
"""A refusal comes sooner; a load that goes on longer is answered with the place of its report."""

_LOOK_S = 0.25
"""As often as the engine says how it is."""

_EMPTY = b"{}"

LOAD = CALLS["models.load"]


class AdminModels(msgspec.Struct, frozen=True, kw_only=True):
    """Every model that the engine holds. load: the one that was asked for last over HTTP."""

    models: tuple[ModelReading, ...]
    load: LoadReport | None


class AdminRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request without its text. why: None once its timeline is not kept any more.

    others: ids of the other requests of the answer, where it has several.
    """

    request: RequestRow
    why: Why | None
    others: tuple[str, ...] = ()


class AdminWhy(msgspec.Struct, frozen=True, kw_only=True):
    """Causes of the time of requests over the last minute. workers: by worker, the time that requests had on
    it."""

    all: Why
    workers: dict[str, Why]


class AdminAlerts(msgspec.Struct, frozen=True, kw_only=True):
    """The alerts, the last to occur first."""

    alerts: tuple[Alert, ...]


class Admin:
    """The endpoints. They answer when what was asked is done; a client that leaves before does not undo it."""

    def __init__(self, context: ApiContext, operations: AdminOperations) -> None:
        self._context = context
        self._engine = context.engine
        self._operations = operations
        self._loads = LoadJobs(context.engine, operations)

    def routes(self) -> list[web.RouteDef]:
        """Return the views, and an endpoint for every call that has a route."""
        return [
            web.get("/admin/models", self._models),
            web.get("/admin/requests/{id}", self._request),
            web.get("/admin/why", self._why),
            web.get("/admin/alerts", self._alerts),
            web.get(LOAD_PATH, self._last_load),
            *(
                self._endpoint(call, call.route)
                for call in (*CALLS.values(), *LOCAL_CALLS.values())
                if call.route is not None
            ),
        ]

    @describes("List loaded models", answer=AdminModels, group="admin")
    async def _models(self, request: web.Request) -> web.Response:
        return self._overview()

    @describes("A running or recent request, and the causes of its latency", answer=AdminRequest, group="admin")
    async def _request(self, request: web.Request) -> web.Response:
        """The request of this id, or the first of the answer's that has it."""
        first, *others = await self._requests_of(request.match_info["id"])
        ids = tuple(each.row.id for each in others)
        return json_response(AdminRequest(request=first.row, why=first.why, others=ids))

    async def _requests_of(self, answer_id: str) -> list[RequestDetail]:
        """Return the request of an answer, or its requests where it has several. Raises RequestNotFound."""
        requests, found = self._operations.link.requests, list[RequestDetail]()
        try:
            return [await requests.detail(answer_id)]
        except RequestNotFound:
            with suppress(RequestNotFound):
                while True:
                    found.append(await requests.detail(id_of_choice(answer_id, len(found))))
            if not found:
                raise
            return found

    @describes("Causes of the latency of all requests over the last minute", answer=AdminWhy, group="admin")
    async def _why(self, request: web.Request) -> web.Response:
        snapshot = self._engine.snapshot()
        return json_response(AdminWhy(all=snapshot.why, workers={each.id: each.why for each in snapshot.workers}))

    @describes("Recent alerts, newest first", answer=AdminAlerts, group="admin")
    async def _alerts(self, request: web.Request) -> web.Response:
        newest_first = sorted(self._engine.alerts.latest, key=lambda each: (each.last_at, each.id), reverse=True)
        return json_response(AdminAlerts(alerts=tuple(newest_first)))

    @describes("The last load", answer=LoadReport, group="admin")
    async def _last_load(self, request: web.Request) -> web.Response:
        if self._loads.last is None:
            raise NotFound("No load yet")
        return json_response(self._loads.last.report())

    def _endpoint(self, call: Call, route: Route) -> web.RouteDef:
        """Return the endpoint that makes a call."""
        names = [each.name for each in arguments_of(call, route)]
        spec: dict[str, Any] = {"answer": AdminModels}
        body: type[CallBody] | None = None
        is_optional = False
        if route.method != "POST":
            spec["query"] = dict.fromkeys(names, route.about)
        elif names:
            body = body_of(call, route)
            is_optional = not (route.any_of or any(each.required for each in arguments_of(call, route)))
            spec |= {"body": body, "optional": is_optional}
        if call is LOAD:
            spec |= {"answer": LoadReport, "event": LoadReport}
        elif call.result is not NoneType:
            spec["answer"] = call.result

        @describes(route.summary, group="admin", **spec)
        async def handle(request: web.Request) -> web.StreamResponse:
            arguments: dict[str, Any] = {
                route.renamed.get(name, name): value for name, value in request.match_info.items()
            }
            arguments |= {name: request.query[name] for name in names if name in request.query and body is None}
            arguments |= route.fixed
            if body is not None:
                arguments |= (await read(request, body, absent=_EMPTY if is_optional else b"")).arguments
            if route.any_of and not any(name in arguments for name in route.any_of):
                *first, last = route.any_of
                raise InvalidRequest(f"Nothing to change: send {', '.join(first)} or {last}")
            if call is LOAD:
                return await self._load(request, arguments)
            result = await self._operations.carry_out(call, arguments)
            return self._overview() if result is None else json_response(_as_json(result))

        add = {"GET": web.get, "POST": web.post, "DELETE": web.delete}[route.method]
        return add(route.path, handle)

    async def _load(self, request: web.Request, arguments: Mapping[str, Any]) -> web.StreamResponse:
        load = self._loads.begin(arguments)
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
        """Send the state of a load whenever it changes, to its end."""
        sent: LoadReport | None = None
        while not load.ended:
            if self._context.traffic.closing:
                raise self._context.traffic.closing_error()
            if (report := load.report()) != sent:
                await chunks.send(report)
                sent = report
            await load.wait(_LOOK_S)
        if load.error is not None:
            raise load.error
        await chunks.send(load.report())

    def _overview(self) -> web.Response:
        last = self._loads.last
        load = None if last is None else last.report()
        return json_response(AdminModels(models=self._engine.models(), load=load))


def _as_json(result: object) -> object:
    """An estimate with its verdict, as `ericllm estimate --json` has it; anything else as it is."""
    if isinstance(result, Estimate):
        return {"can_load": result.can_load, **msgspec.structs.asdict(result)}
    return result


# Bodies, made of the calls that they make and of the settings that a load goes by.

MAX_DEVICES = 64
_OTHER_NAMES = MappingProxyType({"num_workers": "workers"})


class CallBody(Body):
    """Arguments of a call. options_field: the argument whose fields are fields of the body, "" for none."""

    options_field: ClassVar[str] = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are given."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in self if value is not None}
        if not self.options_field:
            return values
        names = {name for name, _, _ in load_options()}
        return {name: value for name, value in values.items() if name not in names} | {
            self.options_field: options_of(values)
        }


def body_of(call: Call, route: Route) -> type[CallBody]:
    """Return the body of a call's endpoint: a field for each argument that its path does not have."""
    knobs = {flag.engine or name: setting for name, setting, flag in fields() if flag.knob}
    found: dict[str, Any] = {}
    options_field = ""
    for argument in arguments_of(call, route):
        if argument.type is LoadOptions:
            options_field = argument.name
            found |= {name: _option_field(setting) for name, setting, _ in load_options()}
        elif argument.name in knobs:
            found[argument.name] = _option_field(knobs[argument.name])
        else:
            found[argument.name] = _with_bounds(argument.type), ... if argument.required else argument.default
    body = create_model(
        f"{call.arguments.__name__}Body", __base__=CallBody, __doc__=inspect.cleandoc(route.about), **found
    )
    body.options_field = options_field
    body.aliases = MappingProxyType(
        {
            other: next(each for each in names if each in found)
            for names in _knob_names()
            if not found.keys().isdisjoint(names)
            for other in names
            if other not in found
        }
    )
    if route.any_of:
        given = ({"required": [name], "properties": {name: {"type": "number"}}} for name in route.any_of)
        body.rules = ({"anyOf": list(given)},)
    return body


def _knob_names() -> Iterator[tuple[str, ...]]:
    """Yield the names of each knob: its setting's, the engine's, and one that clients may use besides."""
    for name, _, flag in fields():
        if flag.knob:
            yield tuple(dict.fromkeys((name, flag.engine or name, _OTHER_NAMES.get(name, name))))


def arguments_of(call: Call, route: Route) -> list[msgspec.structs.FieldInfo]:
    """Return the arguments that query or body have."""
    in_path = {route.renamed.get(name, name) for name in re.findall(r"{(\w+)", route.path)}
    return [each for each in msgspec.structs.fields(call.arguments) if each.name not in in_path | route.fixed.keys()]


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


def _with_bounds(kind: Any) -> Any:
    """Return the type of an argument with its bounds as pydantic has them."""
    if get_origin(kind) is not Annotated:
        return kind
    base, *metas = get_args(kind)
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    bounds = {name: value for meta in metas for name in names if (value := getattr(meta, name)) is not None}
    return Annotated[base, Field(**bounds)]
