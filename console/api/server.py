"""ApiServer: the engine over HTTP, on the engine's own loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

from aiohttp import web

from console.api.admin import Admin
from console.api.chat import Chat
from console.api.completions import Completions
from console.api.context import ApiContext
from console.api.errors import CannotListen
from console.api.generate import Generate
from console.api.middleware import authorizing, counting, errors, sign
from console.api.models import Models
from console.api.operations import Operations
from console.api.operator import Operator
from console.api.settings import ApiSettings
from console.link import ApiStatus
from engine.engine import Engine
from engine.errors import ErrorInfo

log = logging.getLogger("api")

__all__ = ["ApiServer", "ApiSettings"]

_FAREWELL_S = 2.0
"""How long cancelled requests may take to tell their clients so."""


class ApiServer:
    """Serves one engine; may be started and stopped again. Every method but `status` belongs to the engine's loop.

    operator: who carries out what admin endpoints are asked; without one there are none.
    """

    def __init__(self, engine: Engine, settings: ApiSettings, operator: Operator | None = None) -> None:
        self._settings = settings
        self._context = ApiContext(engine, settings, operator)
        self._traffic = self._context.traffic
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._error: ErrorInfo | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Listen; does nothing when it does already. Raises CannotListen with the reason, which `status` keeps."""
        async with self._changing:
            if self._site is not None:
                return
            await self._close_runner()
            runner = web.AppRunner(
                self._app(),
                handler_cancellation=True,
                access_log=None,
                logger=_PeerLog(log),
                shutdown_timeout=_FAREWELL_S,
            )
            await runner.setup()
            site = web.TCPSite(runner, self._settings.host, self._settings.port)
            try:
                await site.start()
            except (OSError, OverflowError, ValueError) as error:
                await runner.cleanup()
                failure = _cannot_listen(error, self._settings)
                self._error = failure.info
                raise failure from error
            self._traffic.closing = False
            self._runner, self._site, self._error = runner, site, None

    async def stop(self, drain_s: float = 5.0) -> None:
        """Take no more work, give what is under way `drain_s`, end the rest and tell its clients.

        Meanwhile it goes on listening: new clients are told at once, and who asks how things are gets an answer.
        Idempotent; where it is cancelled, another call finishes the work.
        """
        async with self._changing:
            self._traffic.closing = True
            await self._traffic.wait_idle(drain_s)
            if self._site is not None:
                site, self._site = self._site, None
                await site.stop()
            self._context.cut()
            await self._traffic.wait_idle(_FAREWELL_S)
            await self._close_runner()

    def status(self) -> ApiStatus:
        """The server now; may be called from any thread."""
        runner, site = self._runner, self._site
        server = None if runner is None else runner.server
        return ApiStatus(
            running=site is not None,
            host=self._settings.host,
            port=self._settings.port if site is None else site.port,
            clients=0 if server is None else len(server.connections),
            requests=self._traffic.total,
            key_required=self._settings.api_key is not None,
            error=self._error,
        )

    async def _close_runner(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _app(self) -> web.Application:
        app = web.Application(
            middlewares=[counting(self._traffic), errors, authorizing(self._settings)],
            client_max_size=self._settings.max_body_bytes,
        )
        for endpoint in (Operations, Models, Completions, Chat, Generate):
            app.add_routes(endpoint(self._context).routes())
        if self._context.operator is not None:
            app.add_routes(Admin(self._context, self._context.operator).routes())
        app.on_response_prepare.append(sign)
        return app


class _PeerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log. What it calls exceptions are bytes that are no HTTP: the client's fault, so one line is enough."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **_: Any) -> None:
        """One line; the traceback where debugging was asked for."""
        said = str(getattr(exc_info, "message", exc_info))  # a parser's own sentence, then what it pointed at
        self.warning("%s: %s", str(msg) % args, said.partition("\n")[0])
        self.debug("its traceback", exc_info=exc_info)


def _cannot_listen(error: Exception, settings: ApiSettings) -> CannotListen:
    """Why it cannot, in words, with what to do about it."""
    host, port = settings.host, settings.port
    reason = str(error)
    if isinstance(error, socket.gaierror) or _has_errno(error, errno.EADDRNOTAVAIL):
        reason = f"{host} is no address of this machine; choose another with --host"
    elif _has_errno(error, errno.EADDRINUSE):
        reason = "another program listens there; choose another port with --port"
    elif _has_errno(error, errno.EACCES):
        reason = f"this user may not use port {port}; choose one above 1023 with --port"
    elif isinstance(error, OverflowError):
        reason = "ports lie between 0 and 65535; choose one with --port"
    return CannotListen(f"Cannot listen on {host} port {port}: {reason}", host=host, port=port)


def _has_errno(error: Exception, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number
