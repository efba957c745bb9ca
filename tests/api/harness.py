"""A real engine with a foretold backend in a thread, served on a free port of loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from console.api.requests.model_list import Loadable
from console.api.server import ApiServer, ApiSettings
from console.link.api import Scope
from console.link.protocol import EngineLink
from engine.config import EngineConfig, ModelSpec
from engine.devices import DeviceProbe
from engine.engine import Engine
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend
from tests.fakes.engines import Backends
from tests.fakes.model import fake_spec

PATIENCE_S = 60.0
T = TypeVar("T")
PROMPT = {"prompt": "x", "max_tokens": 2}


@dataclass(slots=True)
class Served:
    """What a test works with. http: a client session whose base is the server."""

    engine: Engine
    backend: FakeBackend
    server: ApiServer
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self.server.status().url

    async def get(self, path: str, status: int = 200, **options: Any) -> dict[str, Any]:
        """The JSON answer to a GET."""
        async with self.http.get(path, **options) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer

    async def draining(self) -> None:
        """Wait until the server takes no more work."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.http.get("/ready") as response:
                    if (await response.json()).get("error", {}).get("code") in ("engine_closed", "api_stopping"):
                        return

    async def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        """The JSON answer to a POST that must succeed."""
        async with self.http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def load(self, **order: Any) -> dict[str, Any]:
        """How a load over HTTP ended."""
        async with self.http.post("/admin/load", json=order) as response:
            report = await response.json()
            assert response.status in (200, 202), report
        return await self.load_ended()

    async def load_ended(self) -> dict[str, Any]:
        """How the last load over HTTP ended, once it has."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                report = await self.get("/admin/load")
                if report["state"] != "loading":
                    return report

    async def refusal(self, path: str, /, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error object of a POST that must be refused with `status`."""
        async with self.http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == status, answer
            assert set(answer) == {"error"}
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            return answer["error"]

    async def events(self, path: str, /, **body: Any) -> list[Any]:
        """The SSE events of a streaming POST, decoded; pings left out, [DONE] as that string."""
        async with self.http.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            frames = (await response.text()).split("\n\n")
        assert frames.pop() == ""
        lines = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def cut_off(self, asking: Coroutine[Any, Any, T], *, tokens: int) -> T:
        """What comes of a request whose time is up once it has so many tokens, in all of its answers together."""
        asked = asyncio.create_task(asking)
        live = self.engine._tracker.live
        await until(lambda: sum(len(request.generated) for request in live.values()) >= tokens)
        self.expire()
        return await asked

    def expire(self) -> None:
        """The time of all requests is up, whatever limit they have."""
        for request in tuple(self.engine._tracker.live.values()):
            self.engine._tracker._expire(request)

    async def until_row(self, **fields: object) -> None:
        """Wait until the request table has a row with these fields."""
        await until(
            lambda: any(
                all(getattr(row, name) == value for name, value in fields.items())
                for row in self.engine.publish().requests
            )
        )


@asynccontextmanager
async def serving(
    folder: Path,
    backend: FakeBackend | None = None,
    *,
    settings: ApiSettings | None = None,
    config: EngineConfig | None = None,
    load: bool = True,
    spec: ModelSpec | None = None,
    others: Backends | None = None,
    probe: DeviceProbe | None = None,
    operator: FolderOperator | None = None,
    link: Callable[[], EngineLink] | None = None,
    loadable: Loadable | None = None,
) -> AsyncIterator[Served]:
    """Engine, backend and server for one test. `backend` computes the first model that is loaded, and others what comes
    after it; operator: who carries out admin requests; link: what a console elsewhere sees."""
    backend = backend or FakeBackend()
    others = others or Backends()
    first = iter((backend,))
    engine = Engine(
        config or EngineConfig(worker_host="thread"),
        backend_factory=lambda loaded: next(first, None) or others(loaded),
        probe=probe,
    )
    if operator is not None:
        operator.engine = engine
    admit = None if operator is None else operator.admit
    seen = link or (operator.link if operator else None)
    server = ApiServer(engine, settings or ApiSettings(port=0), admit, seen, loadable)
    await engine.start()
    try:
        if load:
            await engine.load(spec or fake_spec(folder))
        await server.start()
        async with aiohttp.ClientSession(server.status().url) as http:
            yield Served(engine, backend, server, http)
    finally:
        for gate in (backend.gate, backend.load_gate):
            if gate is not None:
                gate.open()
        others.open_gates()
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true; fails after a while."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the engine has no event for every state
            await asyncio.sleep(0.005)


def text_of(events: list[Any]) -> str:
    """The text of a completion stream's events."""
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in event["choices"])


async def bearer(api: Served, name: str, *scopes: Scope) -> dict[str, str]:
    """The headers of a new key."""
    made = await api.server.make_key(name, scopes)
    return {"Authorization": f"Bearer {made.key}"}


async def told(api: Served, method: str, path: str, headers: dict[str, str], **body: Any) -> tuple[int, str]:
    """The status and the error's sentence, "" where there is none."""
    options = {"json": body} if method == "POST" else {}
    async with api.http.request(method, path, headers=headers, **options) as response:
        if response.content_type != "application/json":
            return response.status, ""
        return response.status, (await response.json()).get("error", {}).get("message", "")
