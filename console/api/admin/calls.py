"""/admin/call/<group>.<method>: what a console in the engine's process may ask of it, asked from elsewhere.

GET for calls that only look, their arguments in the query; POST for all, their arguments as a JSON object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.http.errors import MethodNotAllowed, NotFound, json_response
from console.api.http.request_body import body_bytes, run_offloaded
from console.api.http.scopes import allows, scope_needed
from console.api.http.traffic import call_of
from console.api.requests.schemas import describes
from console.api.requests.stream import SSE, ChunkStream
from console.link.frames import from_plain, to_plain
from console.link.protocol import EngineLink
from console.link.rpc import CALLS, STREAMS, Call, Names, invoke
from engine.errors import InvalidRequest

log = logging.getLogger("api")

Admit = Callable[[Names, Any], Awaitable[Any]]
"""Finds what a name or a folder of a client stands for; raises EngineError for a folder that is none of ours."""

_LOOK_S = 0.25


class AdminOperations:
    """Carries out calls of clients over HTTP: all that they name is looked up first."""

    def __init__(self, link: Callable[[], EngineLink], admit: Admit) -> None:
        self._link = link
        self._admit = admit

    @property
    def link(self) -> EngineLink:
        """The engine, as a console in its process has it."""
        return self._link()

    async def carry_out(self, call: Call, arguments: Mapping[str, Any]) -> object:
        """Return the result of a call. Raises EngineError."""
        call.check(**arguments)
        admitted = {
            name: await self._admit(kind, arguments[name]) for name, kind in call.named.items() if name in arguments
        }
        return await invoke(call, self.link, {**arguments, **admitted})


class AllowedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the calls that the key of a request may make."""

    calls: tuple[str, ...]


class CallEndpoints:
    """The endpoint. Who only looks is answered while the server stops, too; what was ordered is carried out even where
    its client leaves before."""

    def __init__(self, context: ApiContext, operations: AdminOperations) -> None:
        self._context = context
        self._operations = operations
        self._orders: set[asyncio.Task[object]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        path = "/admin/call/{name}"
        return [
            web.get("/admin/hello", self._hello),
            web.get(path, self._get, allow_head=False),
            web.post(path, self._post),
        ]

    @describes("Calls that the key of this request allows", answer=AllowedCalls, group="admin")
    async def _hello(self, request: web.Request) -> web.Response:
        scopes = call_of(request).scopes
        calls = [name for name, call in CALLS.items() if allows(scopes, call.scope)]
        calls += STREAMS if allows(scopes, scope_needed("POST", "/v1/chat/completions")) else ()
        return json_response(AllowedCalls(calls=tuple(calls)))

    @describes(
        "Make a read-only console call; arguments in the query",
        answer=dict[str, Any],
        group="admin",
    )
    async def _get(self, request: web.Request) -> web.StreamResponse:
        call = _call_of(request)
        if call.scope != "watch":
            raise MethodNotAllowed(f"{call.name} requires POST", allowed="POST")
        arguments = _arguments(call, dict(request.query), strict=False)
        return json_response({"result": to_plain(await self._operations.carry_out(call, arguments))})

    @describes(
        "Make a console call; arguments in the body",
        answer=dict[str, Any],
        group="admin",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        call = _call_of(request)
        document = await run_offloaded(request, partial(_document, body_bytes(request)))
        arguments = await run_offloaded(request, partial(_arguments, call, document, strict=True))
        order = asyncio.create_task(self._operations.carry_out(call, arguments), name=call.name)
        self._orders.add(order)
        order.add_done_callback(self._finish_order)
        if SSE.content_type not in request.headers.get("Accept", ""):
            return json_response({"result": to_plain(await self._done(order))})
        async with ChunkStream(request, self._context.settings) as chunks:
            await chunks.send({"result": to_plain(await self._done(order))})
        return chunks.response

    def _finish_order(self, order: asyncio.Task[object]) -> None:
        """Log a failure, for a client that left before."""
        self._orders.discard(order)
        if not order.cancelled() and (error := order.exception()) is not None:
            log.info("%s failed: %s", order.get_name(), error)

    async def _done(self, order: asyncio.Task[object]) -> object:
        """Return the result of an order. A server that stops does not wait for it."""
        while not order.done():
            await asyncio.wait((order,), timeout=_LOOK_S)
            if self._context.traffic.closing and not order.done():
                raise self._context.traffic.closing_error()
        return order.result()


def _call_of(request: web.Request) -> Call:
    name = request.match_info["name"]
    if name not in CALLS:
        raise NotFound(f"Unknown call {name}; valid: {', '.join(sorted(CALLS))}")
    return CALLS[name]


def _document(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw or b"{}")
    except ValueError as error:  # bytes that are no UTF-8 are one of another kind
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def _arguments(call: Call, given: object, *, strict: bool) -> dict[str, Any]:
    """By name; raises InvalidRequest for what the call does not take."""
    try:
        found: Any = from_plain(given, call.arguments, strict=strict)
    except (msgspec.ValidationError, OverflowError) as error:
        raise InvalidRequest(f"Invalid arguments for {call.name}: {error}") from None
    return {name: getattr(found, name) for name in call.arguments.__struct_fields__}
