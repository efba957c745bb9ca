"""ApiServer: the engine over HTTP, on the engine's own loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from aiohttp import web

from console.api.admin.calls import AdminOperations, Admit
from console.api.app import application
from console.api.context import ApiContext, RequestObservers
from console.api.dialects.registry import DialectRegistry, discover
from console.api.http.auth import Authenticator
from console.api.http.connections import Runner
from console.api.http.errors import CannotListen, Unprotected
from console.api.http.key_file import KeysUnavailable
from console.api.http.keys import Keys
from console.api.http.listening import Address, Listener, max_connections, raise_file_limit
from console.api.http.scopes import describe_scopes
from console.api.http.tls import Certificate, certificate_of
from console.api.openapi import Place, places_of
from console.api.requests.model_list import Loadable
from console.api.settings import ApiSettings
from console.link.api import NO_LIMITS, ApiReport, KeyLimits, NewKey, Scope
from console.link.protocol import ApiStatus, EngineLink
from console.settings.addresses import checked_host, is_loopback
from engine.engine import Engine
from engine.errors import EngineError, ErrorInfo, InvalidRequest

log = logging.getLogger("api")

__all__ = ["ApiServer", "ApiSettings"]

_CANCEL_GRACE_S = 2.0
"""Max time for cancelled requests to answer their clients."""

_LINGER_S = 1.0
"""Max time to read the rest of a refused body, so that its sender reads the refusal."""

_SAVE_S = 60.0
"""Interval of saving the usage of keys."""


class ApiServer:
    """Serves one engine; may be started and stopped again. `status` and `report` may be called from any thread, every
    other method belongs to the engine's loop.

    admit: finds what operators name.  link: what they are shown and may ask for; without these there are no admin
    endpoints.  loadable: the models that requests may have loaded.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ApiSettings,
        admit: Admit | None = None,
        link: Callable[[], EngineLink] | None = None,
        loadable: Loadable | None = None,
    ) -> None:
        self._admin = None if admit is None or link is None else AdminOperations(link, admit)
        self._settings = settings
        self._wanted = Address(settings.host, settings.port)
        dialects = discover()
        unnamed = frozenset[str]().union(*(dialect.unnamed_models for dialect in dialects))
        self._context = ApiContext(engine, settings, unnamed, loadable, observers=RequestObservers(engine.alerts))
        self._traffic = self._context.traffic
        self._keys = Keys(settings.state_dir, settings.api_key)
        self._authenticator = Authenticator(
            self._keys, lambda: self._is_reached_at(self._wanted.host), settings.admin_remote
        )
        self._certificate: Certificate | None = None
        self._dialects = DialectRegistry(self._context, dialects)
        self._runner: Runner | None = None
        self._listener: Listener | None = None
        self._saving: asyncio.Task[None] | None = None
        self._error: ErrorInfo | None = None
        self._changing = asyncio.Lock()
        self._stop_by = math.inf
        self._draining: asyncio.Timeout | None = None
        self._keeps_on = False

    async def start(self) -> None:
        """Listen; does nothing while listening. Takes a stop back that waits for requests under way, but for that of
        the program's end. Raises CannotListen, KeysUnavailable, or InvalidRequest for settings, with the reason, which
        `status` keeps."""
        if self._draining is not None and self._traffic.closing == "api":
            self._keeps_on, self._traffic.closing = True, ""
            self._end_drain(asyncio.get_running_loop().time())
        async with self._changing:
            if self._listener is not None:
                return
            await self._close_runner()
            try:
                self._dialects.switch_off_initially(self._settings.dialects_off)
                await asyncio.to_thread(self._keys.open)
                await self._context.observers.open(self._settings)
                await self._open()
            except EngineError as error:
                self._error = error.info
                await self._context.observers.close()
                raise
            self._traffic.closing, self._error = "", None
            self._saving = self._saving or asyncio.create_task(self._save_regularly())

    async def _open(self) -> None:
        self._refuse_unprotected(self._wanted)
        longest = self._settings.max_header_bytes
        raise_file_limit()
        self._certificate = certificate_of(self._settings)
        runner = Runner(
            self._application(),
            handler_cancellation=True,
            shutdown_timeout=_CANCEL_GRACE_S,
            keepalive_timeout=self._settings.idle_timeout_s,
            write_timeout_s=self._settings.write_timeout_s,
            max_connections=max_connections(),
            lingering_time=_LINGER_S,
            max_line_size=longest,
            max_field_size=longest,
        )
        await runner.setup()
        listener = Listener(runner, None if self._certificate is None else self._certificate.context)
        try:
            await listener.open(self._wanted)
        except CannotListen:
            await runner.cleanup()
            raise
        self._runner, self._listener = runner, listener
        self._warn_where_open()

    def places(self) -> Sequence[Place]:
        """Return all endpoints, by path."""
        return tuple(places_of(self._application(), self._dialects))

    def _application(self) -> web.Application:
        return application(
            self._context,
            self._dialects,
            self._authenticator,
            on_loopback=lambda: is_loopback(self._wanted.host),
            admin=self._admin,
        )

    async def stop(self, drain_s: float = 5.0, *, reason: Literal["api", "program"] = "program") -> bool:
        """Take no more work, give requests under way `drain_s`, then cancel the rest. Returns False where `start` took
        it back meanwhile.

        Meanwhile it goes on listening: new work is refused at once, and requests for the state are answered.
        Idempotent; where it is cancelled, another call finishes the work. Called again with less time, it ends what
        the first call waits for. reason: what ends, the API alone or the program.
        """
        self._stop_by = min(self._stop_by, asyncio.get_running_loop().time() + drain_s)
        if self._draining is not None:
            self._end_drain(self._stop_by)
            if reason == "program":
                self._traffic.closing = reason
        async with self._changing:
            self._traffic.closing, self._keeps_on = reason, False
            await self._drain()
            self._stop_by = math.inf
            if self._keeps_on:
                return False
            if self._listener is not None:
                listener, self._listener = self._listener, None
                await listener.close()
            self._context.cancel_all()
            await self._traffic.wait_idle(_CANCEL_GRACE_S)
            await self._close_runner()
            await self._context.observers.close()
            if self._saving is not None:
                self._saving.cancel()
                self._saving = None
                await self._save()
            return True

    def _end_drain(self, at: float) -> None:
        """Have the drain under way end at that time of the loop, unless it ends in this moment."""
        if self._draining is not None and not self._draining.expired():
            self._draining.reschedule(at)

    async def _drain(self) -> None:
        """Wait until no request is under way, or until `_stop_by`."""
        try:
            async with asyncio.timeout_at(self._stop_by) as self._draining:
                await self._traffic.wait_idle()
        except TimeoutError:
            pass
        finally:
            self._draining = None

    async def listen(self, host: str, port: int) -> None:
        """Listen at another address from now on; where it is off, when it is started next. Requests under way go on.

        Raises CannotListen where that address cannot be had, Unprotected where it may not be listened on without a key:
        it listens where it did, then.
        """
        async with self._changing:
            try:
                wanted = Address(checked_host(host), port)
            except ValueError as error:
                raise InvalidRequest(f"Cannot listen on {host.strip() or 'nothing'}: {error}", param="host") from None
            if self._listener is None:
                self._wanted = wanted
                return
            if wanted == self._listener.address:
                return
            self._refuse_unprotected(wanted)
            try:
                await self._listener.move(wanted)
            except CannotListen as error:
                if self._listener.address is None:
                    self._listener, self._error = None, error.info
                raise
            self._wanted = wanted
            log.info("listening on %s", self.status().url)
            self._warn_where_open()

    async def make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """Return a new key, shown this once. Raises InvalidRequest, or KeysUnavailable where it cannot be saved."""
        made = await asyncio.to_thread(self._keys.make, name, scopes, limits)
        log.info("key %s created: %s", made.name, describe_scopes(made.scopes))
        return made

    async def revoke_key(self, name: str) -> None:
        """Refuse a key from now on. Raises InvalidRequest, also for the last key of a server that others can reach."""
        is_last = [key.name for key in self._keys.readings()] == [name]
        if is_last and self._listener is not None and self._is_reached_at(self._wanted.host):
            raise InvalidRequest(
                f"{name} is the last key, and without one anyone who can connect to {self._wanted} could use the "
                "API: create another first, or listen on 127.0.0.1",
                param="name",
            )
        await asyncio.to_thread(self._keys.revoke, name)
        log.info("key %s revoked", name)

    async def switch_dialect(self, name: str, on: bool) -> None:
        """Answer a dialect or not, from the next request on. Raises InvalidRequest where there is none of that name."""
        self._dialects.switch(name, on)
        log.info("the dialect %s is %s", name, "on" if on else "off")

    def status(self) -> ApiStatus:
        """Return the server's state."""
        runner, listener = self._runner, self._listener
        server = None if runner is None else runner.server
        address = None if listener is None else listener.address
        return ApiStatus(
            running=address is not None,
            host=self._wanted.host if address is None else address.host,
            port=self._wanted.port if address is None else address.port,
            clients=len(self._traffic.clients()),
            connections=0 if server is None else len(server.connections),
            requests=self._traffic.total,
            stopping=address is not None and self._traffic.closing != "",
            refused_per_min=self._traffic.refused_per_min(),
            key_required=self._keys.required or (address is not None and self._authenticator.key_required),
            no_auth=self._settings.no_auth,
            tls=self._settings.tls_cert is not None,
            error=self._error,
        )

    def report(self) -> ApiReport:
        """Return clients, keys, dialects and failures."""
        traffic = self._traffic
        per_second = traffic.per_second()
        return ApiReport(
            at=time.time(),
            under_way=traffic.under_way,
            requests=traffic.total,
            requests_per_min=sum(per_second),
            failures_per_min=traffic.failures_per_min(),
            per_second=per_second,
            keys=self._keys.readings(),
            dialects=self._dialects.readings(traffic.dialects()),
            clients=traffic.clients(),
            failures=traffic.failures(),
            failure_counts=traffic.failure_counts(),
        )

    async def _close_runner(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_S)
            await self._save()
            self._renew_certificate()

    async def _save(self) -> None:
        """Save the usage of keys."""
        try:
            await asyncio.to_thread(self._keys.save)
        except KeysUnavailable as error:
            log.warning("%s", error.message)

    def _renew_certificate(self) -> None:
        """Reload the certificate where its files changed."""
        try:
            if self._certificate is not None and self._certificate.renew():  # here, between two handshakes
                log.info("renewed certificate loaded")
        except CannotListen as error:
            log.warning("%s; keeping the old certificate", error.message)

    def _is_reached_at(self, host: str) -> bool:
        """Return whether others reach the server at that host, without --no-auth."""
        return not is_loopback(host) and not self._settings.no_auth

    def _refuse_unprotected(self, address: Address) -> None:
        """Raise Unprotected where no key protects an address that others reach."""
        if self._is_reached_at(address.host) and not self._keys.required:
            raise Unprotected(
                f"Not listening on {address} without a key: anyone who can connect could use the API. "
                "Create one (ericllm api-keys make NAME), set --api-key-file, or use --no-auth",
                host=address.host,
                port=address.port,
            )

    def _warn_where_open(self) -> None:
        if (status := self.status()).is_open:
            log.warning("--no-auth: anyone who can connect to %s can use the API without a key", status.url)
