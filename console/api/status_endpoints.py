"""Endpoints for operators and their tools: GET /, /health, /ready and /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics

from console.api.context import ApiContext
from console.api.http.errors import json_response
from console.api.metrics import SnapshotCollector
from console.api.requests.schemas import describes
from console.api.requests.served_model import not_ready
from console.api.version import product_version
from engine.errors import Draining, NoModelLoaded
from engine.snapshot import ModelReading, ModelState, Snapshot, WorkerReading


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Name, version and model of the server."""

    name: str = "EricLLM Console"
    version: str
    model: str | None
    state: str
    endpoints: list[str]


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One model. workers: those that take requests.  wanted_workers: the target."""

    name: str
    state: ModelState
    workers: int
    wanted_workers: int


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. step_age_s: seconds since its last report, null before the first.

    stalled: True if that is too long.  deaths: crashes in a row; restarts: in all.
    """

    id: str
    model: str
    state: str
    active: int
    step_age_s: float | None
    stalled: bool
    deaths: int
    restarts: int
    retry_in_s: float | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine: "ok", "stalled" when a worker has not reported for too long, or "draining" while new
    requests are refused, because an operator drains it or the server stops.

    model_state: of the first model.  unfinished: requests that run or wait.
    """

    status: Literal["ok", "stalled", "draining"]
    model_state: ModelState
    models: list[ModelHealth]
    workers: list[WorkerHealth]
    unfinished: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answers; an "idle" one is loaded by the next request."""

    status: Literal["ready", "idle"]
    model: str


class Operations:
    """GET /, /health, /ready and /metrics."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SnapshotCollector(context.engine.snapshot, context.engine.usage))
        self._registry.register(context.observers)

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.get("/", self._about),
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
        ]

    @describes("Name and version of the server", answer=About)
    async def _about(self, request: web.Request) -> web.Response:
        status = self._context.engine.status
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        name = status.spec.name if status.spec is not None and status.state == "ready" else None
        return json_response(About(version=product_version(), model=name, state=status.state, endpoints=paths))

    @describes("Health of the engine; 503 if a worker hangs", answer=Health)
    async def _health(self, request: web.Request) -> web.Response:
        """Answer by the workers' last reports; answering at all proves that the engine's loop runs."""
        snapshot = self._context.engine.snapshot()
        workers = [_health(worker, self._context.settings.stall_s) for worker in snapshot.workers]
        stalled = any(worker.stalled for worker in workers)
        draining = self._context.traffic.closing or snapshot.draining_since is not None
        health = Health(
            status="stalled" if stalled else "draining" if draining else "ok",
            model_state=snapshot.status.state,
            models=[_model_health(model, workers) for model in snapshot.models],
            workers=workers,
            unfinished=snapshot.running + snapshot.queued,
        )
        return json_response(health, status=503 if stalled else 200)

    @describes("Readiness; 503 if no model can answer", answer=Ready)
    async def _ready(self, request: web.Request) -> web.Response:
        if self._context.traffic.closing:
            raise self._context.traffic.closing_error()
        return json_response(_readiness(self._context.engine.snapshot(), self._context.settings.stall_s))

    @describes("Prometheus metrics", answer="text/plain")
    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = _encoder(request.headers.get("Accept", ""))
        return web.Response(
            body=encode(self._registry, escaping=openmetrics.ALLOWUTF8), headers={"Content-Type": content_type}
        )


def _encoder(accept: str) -> tuple[Callable[..., bytes], str]:
    """Return the encoder of the metrics format that a client accepts, and its content type; the plain text format where
    the version is not a number.

    All names here are valid without escaping, colons included, so no escaping scheme is offered: the library's own
    would rename vLLM's metrics, whose samples then belong to no declared family. OpenMetrics is 1.0.0 whatever newer
    version is requested, which the library would repeat.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:
        encode, content_type = choose_encoder("")
    if content_type.startswith("application/openmetrics-text"):
        return openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
    return encode, content_type.partition("; escaping=")[0]


def is_stalled(worker: WorkerReading, stall_s: float) -> bool:
    """Return whether a worker has not reported for `stall_s`; idle ones report every second."""
    age_s = worker.last_step_age_s
    return worker.state in ("ready", "draining") and age_s is not None and age_s > stall_s


def _health(worker: WorkerReading, stall_s: float) -> WorkerHealth:
    return WorkerHealth(
        id=worker.id,
        model=worker.model,
        state=worker.state,
        active=worker.active,
        step_age_s=worker.last_step_age_s,
        stalled=is_stalled(worker, stall_s),
        deaths=worker.deaths_in_a_row,
        restarts=worker.restarts,
        retry_in_s=worker.retry_in_s,
    )


def _model_health(model: ModelReading, workers: list[WorkerHealth]) -> ModelHealth:
    taking = [each for each in workers if each.model == model.name and each.state == "ready" and not each.stalled]
    return ModelHealth(
        name=model.name, state=model.status.state, workers=len(taking), wanted_workers=model.target_workers
    )


def _readiness(snapshot: Snapshot, stall_s: float) -> Ready:
    """Return the first model where it answers; raises Draining, or NoModelLoaded with the reason where it does not."""
    if snapshot.draining_since is not None:
        unfinished = snapshot.running + snapshot.queued
        seconds = max(0, int(snapshot.at - snapshot.draining_since))
        raise Draining(f"Draining for {seconds} s: {unfinished} unfinished; new requests are refused")
    status = snapshot.status
    if status.spec is not None and status.state == "idle":
        return Ready(status="idle", model=status.spec.name)
    if status.state != "ready" or status.spec is None:
        raise not_ready(status)
    own = [worker for worker in snapshot.workers if worker.model == status.spec.name]
    if not any(worker.state == "ready" and not is_stalled(worker, stall_s) for worker in own):
        raise NoModelLoaded(f"The model {status.spec.name} is loaded, but no worker is ready", state="ready")
    return Ready(status="ready", model=status.spec.name)
