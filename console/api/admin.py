"""What an operator may do over HTTP: load and unload models, turn their knobs, attach adapters, restart workers."""

from __future__ import annotations

import msgspec
from aiohttp import web

from console.api.body import read
from console.api.context import ApiContext
from console.api.described import describes
from console.api.errors import NotFound, json_response
from console.api.loads import WHERE, Load, LoadReport, Loads
from console.api.operator import Operator
from console.api.orders import AdapterBody, LoadBody, ReconfigureBody, UnloadBody
from console.api.stream import SSE, ChunkStream
from engine.errors import EngineClosed, InvalidRequest
from engine.estimate import Estimate
from engine.snapshot import ModelReading, Snapshot

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
        self._loads = Loads(context.engine, operator)

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/admin/models", self._models),
            web.get("/admin/snapshot", self._snapshot),
            web.get(WHERE, self._last_load),
            web.post(WHERE, self._load),
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
        return json_response(self._engine.published)

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
        load = self._loads.begin(body.order())
        await load.wait(_REFUSAL_S)
        if load.error is not None:
            raise load.error
        if SSE.content_type in request.headers.get("Accept", ""):
            async with ChunkStream(request, self._context.settings) as chunks:
                await self._follow(load, chunks)
            return chunks.response
        response = json_response(load.report(), status=200 if load.ended else 202)
        response.headers["Location"] = WHERE
        return response

    async def _follow(self, load: Load, chunks: ChunkStream) -> None:
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
        found = await self._operator.estimate(body.order())
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
        if body.is_empty:
            raise InvalidRequest("Nothing to change: send workers, max_prompts or idle_unload_s")
        await self._engine.reconfigure(
            model=body.model, workers=body.workers, max_prompts=body.max_prompts, idle_unload_s=body.idle_unload_s
        )
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
        there = [worker.id for worker in self._engine.published.workers]
        if worker_id not in there:
            raise NotFound(f"There is no worker {worker_id}; there are: {', '.join(there) or 'none'}")
        await self._engine.restart_worker(worker_id)
        return self._overview()

    def _overview(self) -> web.Response:
        last = self._loads.last
        load = None if last is None else last.report()
        return json_response(AdminModels(models=self._engine.published.models, load=load))
