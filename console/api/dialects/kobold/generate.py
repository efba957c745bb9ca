"""Generation: whole answers, streams, and requests that read or stop an answer under way."""

from __future__ import annotations

from contextlib import aclosing
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.kobold.body import KeyBody, KoboldBody
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.generation import WhyField
from console.api.requests.schemas import describes
from console.api.requests.stream import ChunkStream, Framing
from console.api.requests.text_frontends import LiveGenerations
from engine.backends.base import FinishReason
from engine.errors import InvalidRequest

VERSIONS = ("v1", "latest")

_SSE = Framing("text/event-stream", lambda document: b"event: message\ndata: %b\n\n" % document, b": ping\n\n")
_EXAMPLE = {"prompt": "Once upon a time", "max_length": 16}

KoboldFinish = Literal["stop", "length"]


class Result(msgspec.Struct, frozen=True):
    """One answer, without its prompt."""

    text: str
    finish_reason: KoboldFinish


class Results(msgspec.Struct, frozen=True):
    """All answers. why: what their time went into, where requested."""

    results: list[Result]
    why: WhyField = msgspec.UNSET


class Pending(msgspec.Struct, frozen=True):
    """An answer under way, as far as it is generated."""

    text: str


class Checked(msgspec.Struct, frozen=True):
    """The answer under way."""

    results: list[Pending]


class Token(msgspec.Struct, frozen=True):
    """A piece of an answer. finish_reason: null before the last piece.  why: with the last one, where requested."""

    token: str
    finish_reason: KoboldFinish | None
    why: WhyField = msgspec.UNSET


class Aborted(msgspec.Struct, frozen=True):
    """Result of an abort: "true" if there was an answer to stop."""

    success: Literal["true", "false"]
    done: Literal["true", "false"]


class GenerateEndpoints:
    """POST .../generate, and /api/extra/generate/... and /api/extra/abort."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._running = LiveGenerations(context)

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            *(web.post(f"/api/{version}/generate", self._generate) for version in VERSIONS),
            web.post("/api/extra/generate/stream", self._stream),
            web.get("/api/extra/generate/check", self._check),
            web.post("/api/extra/generate/check", self._check_by_key),
            web.post("/api/extra/abort", self._abort),
        ]

    @describes("Complete a text (KoboldAI)", body=KoboldBody, answer=Results, example=_EXAMPLE)
    async def _generate(self, request: web.Request) -> web.Response:
        body = await read(request, KoboldBody)
        if body.stream:
            raise InvalidRequest("stream is not supported here: use /api/extra/generate/stream", param="stream")
        async with self._running.answering(request, "kobold", body, key=body.genkey) as live:
            answers = await live.answers(body.n)
        return json_response(Results([Result(text, _finish(finish)) for text, finish in answers], live.why))

    @describes("Complete a text as a stream (KoboldCpp)", body=KoboldBody, event=Token, example=_EXAMPLE)
    async def _stream(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, KoboldBody)
        if body.n > 1:
            raise InvalidRequest("n must be 1 in a stream", param="n")
        async with (
            self._running.answering(request, "kobold", body, key=body.genkey, framing=_SSE) as live,
            ChunkStream(request, self._context.settings, _SSE) as chunks,
        ):
            ended = False
            async with aclosing(live.pieces()) as pieces:
                async for piece in pieces:
                    ended = piece.finish is not None
                    await chunks.send(Token(piece.text, _finish(piece.finish) if ended else None, live.why))
            if not ended:
                await chunks.send(Token("", _finish(None)))
        return chunks.response

    @describes("Partial text of this client's running answer without a genkey", answer=Checked)
    async def _check(self, request: web.Request) -> web.Response:
        return self._pending(request, "")

    @describes("Partial text of this client's running answer", body=KeyBody, optional=True, answer=Checked)
    async def _check_by_key(self, request: web.Request) -> web.Response:
        return self._pending(request, (await read(request, KeyBody, absent=b"{}")).genkey)

    @describes("Stop this client's running answer", body=KeyBody, optional=True, answer=Aborted)
    async def _abort(self, request: web.Request) -> web.Response:
        body = await read(request, KeyBody, absent=b"{}")
        success: Literal["true", "false"] = "true" if self._running.stop(request, body.genkey) else "false"
        return json_response(Aborted(success, success))

    def _pending(self, request: web.Request, genkey: str) -> web.Response:
        return json_response(Checked([Pending(self._running.text(request, genkey))]))


def _finish(finish: FinishReason | None) -> KoboldFinish:
    """Return why an answer ended, in KoboldCpp's words: "length" also for one that was stopped or ran out of time."""
    return "stop" if finish == "stop" else "length"
