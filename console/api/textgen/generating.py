"""POST /api/v1/generate and /api/v1/stop-stream."""

from __future__ import annotations

import msgspec
from aiohttp import web

from console.api.body import read
from console.api.described import describes
from console.api.errors import json_response
from console.api.running import Running
from console.api.textgen.body import TextgenBody
from engine.errors import InvalidRequest


class Result(msgspec.Struct, frozen=True):
    """One answer, without its prompt."""

    text: str


class Results(msgspec.Struct, frozen=True):
    """All answers."""

    results: list[Result]


class Stopped(msgspec.Struct, frozen=True):
    """Whatever there was to stop is stopped."""

    results: str = "success"


class Generating:
    """The endpoints."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [web.post("/api/v1/generate", self._generate), web.post("/api/v1/stop-stream", self._stop)]

    @describes(
        "Continue a text, as text-generation-webui's own API did",
        body=TextgenBody,
        answer=Results,
        example={"prompt": "Once upon a time", "max_new_tokens": 16},
    )
    async def _generate(self, request: web.Request) -> web.Response:
        body = await read(request, TextgenBody)
        if body.stream:
            raise InvalidRequest("stream is not supported here: use the websocket /api/v1/stream", param="stream")
        async with self._running.answering(request, "text", body) as live:
            answers = await live.answers(body.n)
        return json_response(Results([Result(text) for text, _ in answers]))

    @describes("End the answers of this client that are under way; each is given as far as it has come", answer=Stopped)
    async def _stop(self, request: web.Request) -> web.Response:
        if self._running.is_shared(request, ""):
            raise InvalidRequest(
                "Several clients of this key or address have answers under way: it cannot be told which are to end. "
                "A client that closes its connection ends its own"
            )
        self._running.stop(request, "")
        return json_response(Stopped())
