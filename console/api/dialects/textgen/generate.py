"""POST /api/v1/generate and /api/v1/stop-stream, their websocket, and the shape of all errors; GET and POST
/api/v1/model, and POST /api/v1/token-count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from console.api.context import ApiContext
from console.api.dialects.textgen.body import CountBody, ModelBody, TextgenBody
from console.api.http.errors import (
    AS_SENT,
    BadHttp,
    ErrorBody,
    ErrorEnvelope,
    InternalError,
    envelope,
    json_response,
    localized_message,
)
from console.api.http.request_body import release_bytes, reserve_bytes, run_offloaded, store_body
from console.api.http.traffic import call_of, public_error, record_failure
from console.api.requests.body import read
from console.api.requests.generation import WhyField
from console.api.requests.model_list import first_name
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import describes
from console.api.requests.text_frontends import LiveGeneration, LiveGenerations
from engine.errors import EngineError, InvalidRequest

# Errors, for most of which text-generation-webui had no shape: OpenAI's, with its own field names.

FIELD_NAMES: Mapping[str, str] = {
    "cfg_scale": "guidance_scale",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_length",
    "repetition_range": "repetition_penalty_range",
    "stop": "stopping_strings",
}


def format_error(error: EngineError) -> ErrorEnvelope:
    """Return the error as {"error": {"message": ...}}."""
    body = envelope(error).error
    param = body.param
    if param is not None and not error.details.get(AS_SENT):
        param = FIELD_NAMES.get(param, param)
    message = localized_message(error, FIELD_NAMES)
    return ErrorEnvelope(msgspec.structs.replace(body, message=message, param=param))


class Result(msgspec.Struct, frozen=True):
    """One answer, without its prompt."""

    text: str


class Results(msgspec.Struct, frozen=True):
    """All answers. why: what their time went into, where requested."""

    results: list[Result]
    why: WhyField = msgspec.UNSET


class Stopped(msgspec.Struct, frozen=True):
    """Result of stopping the client's answers."""

    results: str = "success"


class TextEndpoints:
    """POST /api/v1/generate and /api/v1/stop-stream, and the websocket, which share the answers under way."""

    def __init__(self, context: ApiContext) -> None:
        self._running = LiveGenerations(context)
        self._stream = StreamEndpoint(context, self._running)

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.post("/api/v1/generate", self._generate),
            web.post("/api/v1/stop-stream", self._stop),
            *self._stream.routes(),
        ]

    @describes(
        "Complete a text (text-generation-webui)",
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
        return json_response(Results([Result(text) for text, _ in answers], live.why))

    @describes("Stop this client's running answers", answer=Stopped)
    async def _stop(self, request: web.Request) -> web.Response:
        if self._running.is_shared(request, ""):
            raise InvalidRequest(
                "Several clients of this key or address have running answers, so the one to stop is unknown. "
                "Close the connection of an answer to stop it"
            )
        self._running.stop(request, "")
        return json_response(Stopped())


# GET /api/v1/stream: the websocket. A connection takes one prompt, so that limits of keys hold for each prompt.

log = logging.getLogger(__name__)

MAX_PINGS = 100
"""Per second and connection. Clients send one in ten seconds."""

_ENDS = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)


class TextStream(msgspec.Struct, frozen=True):
    """A piece of the answer. message_num: from 0."""

    message_num: int
    text: str
    event: Literal["text_stream"] = "text_stream"


class StreamEnd(msgspec.Struct, frozen=True):
    """The answer is complete. why: what its time went into, where requested."""

    message_num: int
    why: WhyField = msgspec.UNSET
    event: Literal["stream_end"] = "stream_end"


class Failed(msgspec.Struct, frozen=True):
    """The answer failed: the connection is closed after this."""

    error: ErrorBody
    event: Literal["error"] = "error"


class StreamEndpoint:
    """GET /api/v1/stream."""

    def __init__(self, context: ApiContext, running: LiveGenerations) -> None:
        self._context = context
        self._running = running

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.get("/api/v1/stream", self._connect)]

    @describes("Complete a text over a websocket", success=101)
    async def _connect(self, request: web.Request) -> web.StreamResponse:
        settings = self._context.settings
        socket = web.WebSocketResponse(heartbeat=settings.ping_s, max_msg_size=settings.max_body_bytes, autoping=False)
        if not socket.can_prepare(request).ok:
            raise BadHttp(f"{request.path} is a websocket; send an upgrade request")
        await socket.prepare(request)
        with suppress(ConnectionError):
            try:
                await self._answer(request, socket)
            except ConnectionError:
                raise
            except Exception as error:
                await self._fail(request, socket, error)
        return socket

    async def _answer(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        """Read a prompt and send its continuation."""
        body = await self._first(request, socket)
        if body is None:
            return
        if body.n > 1:
            raise InvalidRequest("n must be 1", param="n")
        number = 0
        async with (
            self._running.answering(request, "text", body) as live,
            _cancel_on_leave(request, socket, live),
            aclosing(live.pieces()) as pieces,
        ):
            async for piece in pieces:
                if piece.text:
                    await self._send(request, socket, TextStream(number, piece.text))
                    number += 1
        await self._send(request, socket, StreamEnd(number, live.why))
        await self._in_time(request, socket.close())

    async def _first(self, request: web.Request, socket: web.WebSocketResponse) -> TextgenBody | None:
        """Return the first message; None where the client leaves or is silent for too long, or the server stops."""
        reserve_bytes(request, self._context.settings.max_body_bytes)  # aiohttp buffers a message until it is complete
        try:
            async with self._context.waiting(self._context.settings.idle_timeout_s):
                message = await _next_message(request, socket)
        except TimeoutError:
            await socket.close()
            return None
        if message.type in _ENDS:
            return None
        call_of(request).arrived = asyncio.get_running_loop().time()
        raw = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        release_bytes(request)
        reserve_bytes(request, len(raw))
        store_body(request, raw)
        await run_offloaded(request, partial(self._context.json_bounds().check, raw))
        return await read(request, TextgenBody)

    async def _fail(self, request: web.Request, socket: web.WebSocketResponse, error: Exception) -> None:
        """Send the error and close: an answer without stream_end cannot be mistaken for a whole one."""
        if socket.closed:
            return
        if isinstance(error, EngineError):
            shown = error
        else:
            log.error("%s %s failed", request.method, request.path, exc_info=error)
            shown = InternalError("Internal error while answering; the server log has the cause")
        record_failure(request, shown)
        code = WSCloseCode.INTERNAL_ERROR if shown.http_status >= 500 else WSCloseCode.POLICY_VIOLATION
        await self._send(request, socket, Failed(format_error(public_error(request, shown)).error))
        await self._in_time(request, socket.close(code=code))

    async def _send(self, request: web.Request, socket: web.WebSocketResponse, event: object) -> None:
        await self._in_time(request, socket.send_str(msgspec.json.encode(event).decode()))

    async def _in_time(self, request: web.Request, sending: Awaitable[object]) -> None:
        """Send, and disconnect a client that reads nothing for too long."""
        try:
            async with asyncio.timeout(self._context.settings.write_timeout_s):
                await sending
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None


@asynccontextmanager
async def _cancel_on_leave(
    request: web.Request, socket: web.WebSocketResponse, live: LiveGeneration
) -> AsyncIterator[None]:
    """Stop the answer when the client leaves, while the context lasts."""
    watching = asyncio.create_task(_watch(request, socket, live))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(request: web.Request, socket: web.WebSocketResponse, live: LiveGeneration) -> None:
    """Stop the answer when the client leaves or sends a second prompt."""
    try:
        message = await _next_message(request, socket)
    except ConnectionError:
        live.cancel(None)
        return
    live.cancel(
        None if message.type in _ENDS else InvalidRequest("One prompt per connection; open another for the next")
    )


async def _next_message(request: web.Request, socket: web.WebSocketResponse) -> WSMessage:
    """Return the next message, answering pings meanwhile. A flood of pings, all of which aiohttp would answer before it
    serves other clients, ends the connection; raises ConnectionError then."""
    clock = asyncio.get_running_loop().time
    since, pings = clock(), 0
    while (message := await socket.receive()).type in (WSMsgType.PING, WSMsgType.PONG):
        if clock() - since > 1.0:
            since, pings = clock(), 0
        pings += 1
        if pings > MAX_PINGS and request.transport is not None:
            record_failure(request, BadHttp(f"More than {MAX_PINGS} pings in a second"))
            request.transport.abort()
            raise ConnectionResetError("the client floods its connection with pings")
        if message.type is WSMsgType.PING:
            await socket.pong(message.data)
    return message


# The model's name, and the tokens of a text.

_NO_MODEL = "None"
"""text-generation-webui's name of no model."""

_ADMIN = "use /admin/load and /admin/unload, with a key of scope admin"


class Named(msgspec.Struct, frozen=True):
    """The model's name, or what the body asks for."""

    result: Any


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that answers, and its adapters."""

    model_name: str
    lora_names: list[str]


class Count(msgspec.Struct, frozen=True):
    """The number of tokens of a text."""

    tokens: int


class Counts(msgspec.Struct, frozen=True):
    """The counts, one for the text."""

    results: list[Count]


class InfoEndpoints:
    """GET and POST /api/v1/model, POST /api/v1/token-count."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.get("/api/v1/model", self._model),
            web.post("/api/v1/model", self._act),
            web.post("/api/v1/token-count", self._count),
        ]

    @describes("Name of the model", answer=Named)
    async def _model(self, request: web.Request) -> web.Response:
        return json_response(Named(self._name()))

    @describes("List models and adapters (loading is refused)", body=ModelBody, answer=Named)
    async def _act(self, request: web.Request) -> web.Response:
        body = await read(request, ModelBody, absent=b"{}")
        models = self._context.models_for(request).answering()
        match body.action:
            case "":
                return json_response(Named(self._name()))
            case "info":
                loras = [adapter.name for adapter in models[0].adapters] if models else []
                return json_response(Named(ModelInfo(self._name(), loras)))
            case "list":
                return json_response(Named([model.name for model in models]))
            case "list_lora":
                return json_response(Named([adapter.name for model in models for adapter in model.adapters]))
            case "load" | "unload" | "add_lora" | "settings" | "list_settings":
                raise InvalidRequest(f"action {body.action} is not supported here: {_ADMIN}", param="action")
            case _:
                raise InvalidRequest("action should be info, list or list_lora", param="action")

    @describes("Count the tokens of a text", body=CountBody, answer=Counts)
    async def _count(self, request: web.Request) -> web.Response:
        body = await read(request, CountBody)
        model = await self._context.served_model(request, SamplingFields.from_document({}))
        return json_response(Counts([Count(len(await model.count(body.prompt)))]))

    def _name(self) -> str:
        return first_name(self._context.engine) or _NO_MODEL
