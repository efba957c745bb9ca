"""What operators and their tools ask: GET /, /health, /ready and /metrics."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from console.api.context import ApiContext
from console.api.errors import json_response
from console.api.metrics import SnapshotCollector
from console.api.served import not_ready
from engine.errors import NoModelLoaded
from engine.snapshot import Snapshot, WorkerReading


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What this is."""

    name: str = "EricLLM Console"
    version: str
    model: str | None
    state: str
    endpoints: list[str]


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. step_age_s: seconds since it last reported, None before the first time."""

    id: str
    state: str
    active: int
    step_age_s: float | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine lives: "ok", or "stalled" when a worker has been silent for too long."""

    status: str
    model_state: str
    workers: list[WorkerHealth]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answers."""

    status: str = "ready"
    model: str


class Operations:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SnapshotCollector(context.engine.snapshot))

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/", self._about),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
        ]

    async def _about(self, request: web.Request) -> web.Response:
        status = self._context.engine.status
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        name = status.spec.name if status.spec is not None and status.state == "ready" else None
        return json_response(About(version=_version(), model=name, state=status.state, endpoints=paths))

    async def _health(self, request: web.Request) -> web.Response:
        """That this runs proves that the engine's loop turns; the workers are judged by their last steps."""
        snapshot = self._context.engine.snapshot()
        stalled = any(is_stalled(worker, self._context.settings.stall_s) for worker in snapshot.workers)
        health = Health(
            status="stalled" if stalled else "ok",
            model_state=snapshot.status.state,
            workers=[
                WorkerHealth(id=worker.id, state=worker.state, active=worker.active, step_age_s=worker.last_step_age_s)
                for worker in snapshot.workers
            ],
        )
        return json_response(health, status=503 if stalled else 200)

    async def _ready(self, request: web.Request) -> web.Response:
        return json_response(Ready(model=_ready_model(self._context.engine.snapshot(), self._context.settings.stall_s)))

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def is_stalled(worker: WorkerReading, stall_s: float) -> bool:
    """Whether a worker has been silent for `stall_s`. Idle ones report every second, so they are never just old."""
    age_s = worker.last_step_age_s
    return worker.state in ("ready", "draining") and age_s is not None and age_s > stall_s


def _ready_model(snapshot: Snapshot, stall_s: float) -> str:
    """The model that answers; raises NoModelLoaded with the reason why none does."""
    status = snapshot.status
    if status.state != "ready" or status.spec is None:
        raise not_ready(status)
    if not any(worker.state == "ready" and not is_stalled(worker, stall_s) for worker in snapshot.workers):
        raise NoModelLoaded(f"The model {status.spec.name} is loaded, but none of its workers answers", state="ready")
    return status.spec.name


def _version() -> str:
    try:
        return version("ericllm")
    except PackageNotFoundError:
        return "unknown"
