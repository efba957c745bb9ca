"""A server that a bench asks, in any dialect, which says the same whatever it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from aiohttp import web
from aiohttp.test_utils import TestServer

TWO_TOKENS = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": {"completion_tokens": 2}}]
"""In OpenAI's dialect."""


class Server:
    """refuses: names of fields that it does not take, with that status.  key: without which nothing is answered.

    lists: the names of its models.  broken: what requests of these numbers are answered with, as it is.
    stays: set, an answer ends.  bodies: what it was asked.
    """

    def __init__(
        self,
        path: str = "/v1/completions",
        events: Sequence[object] = TWO_TOKENS,
        refuses: Sequence[str] = (),
        status: int = 400,
        *,
        key: str = "",
        lists: Sequence[str] = (),
        broken: Mapping[int, bytes] | None = None,
    ) -> None:
        self.bodies: list[dict[str, object]] = []
        self.stays = asyncio.Event()
        self.stays.set()
        self._events, self._refuses, self._status, self._key, self._lists = events, refuses, status, key, lists
        self._broken = broken or {}
        app = web.Application()
        app.router.add_post(path, self._answer)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self.server.make_url("")).rstrip("/")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self._lists]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "that key is none of ours"}}, status=401)
        if any(name in body for name in self._refuses):
            return web.json_response({"error": "unknown field"}, status=self._status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        broken = self._broken.get(len(self.bodies) - 1)
        if broken is not None:
            await answer.write(broken)
            return answer
        for event in self._events:
            await answer.write(b": ping\n\nevent: message\ndata: %s\n\n" % json.dumps(event).encode())
        await self.stays.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer
