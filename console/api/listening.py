"""Where the server listens: an address, another one without losing a request, and why one cannot be had."""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import dataclass

from aiohttp import web

from console.api.errors import CannotListen


@dataclass(frozen=True, slots=True)
class Address:
    """port: 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"


class Listener:
    """The one address at which an application takes connections. tls: what it speaks TLS with, None for plain HTTP."""

    def __init__(self, runner: web.AppRunner, tls: ssl.SSLContext | None = None) -> None:
        self._runner = runner
        self._tls = tls
        self._site: web.TCPSite | None = None
        self._host = ""

    @property
    def address(self) -> Address | None:
        """Where it listens, with the port that was found free; None while it does not."""
        return None if self._site is None else Address(self._host, self._site.port)

    async def open(self, address: Address) -> None:
        """Listen; raises CannotListen with the reason, in words, with what to do about it."""
        site = web.TCPSite(self._runner, address.host, address.port, ssl_context=self._tls)
        try:
            await site.start()
        except (OSError, OverflowError, ValueError) as error:
            await site.stop()
            raise _cannot_listen(error, address) from error
        self._site, self._host = site, address.host

    async def close(self) -> None:
        """Take no more connections; those there are stay."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop()

    async def move(self, address: Address) -> None:
        """Listen at another address instead. Requests under way go on; connections without any are closed, so that
        nobody stays who could not come now.

        Two addresses with one port may be in each other's way, so the first is let go of before the second is taken.
        Raises CannotListen where that cannot be had: it listens where it did, then.
        """
        before, site = self.address, self._site
        server = self._runner.server
        connections = [] if server is None else server.connections
        in_the_way = before is not None and before.port == address.port
        if in_the_way:
            await self.close()
        try:
            await self.open(address)
        except CannotListen as error:
            raise await self._back_at(before, error) from error
        if site is not None and not in_the_way:
            await site.stop()
        for connection in connections:
            connection.close()

    async def _back_at(self, before: Address | None, reason: CannotListen) -> CannotListen:
        """Listen where it did, and the reason with what came of that."""
        if before is None:
            return reason
        try:
            if self._site is None:
                await self.open(before)
        except CannotListen as error:
            return CannotListen(f"{reason.message}. Nor can it go back: {error.message}", **reason.details)
        return CannotListen(f"{reason.message}. It goes on listening on {before}", **reason.details)


def _cannot_listen(error: Exception, address: Address) -> CannotListen:
    reason = str(error)
    if isinstance(error, socket.gaierror) or _has_errno(error, errno.EADDRNOTAVAIL):
        reason = f"{address.host} is no address of this machine; choose another with --host"
    elif _has_errno(error, errno.EADDRINUSE):
        reason = "another program listens there; choose another port with --port"
    elif _has_errno(error, errno.EACCES):
        reason = f"this user may not use port {address.port}; choose one above 1023 with --port"
    elif isinstance(error, OverflowError):
        reason = "ports lie between 0 and 65535; choose one with --port"
    return CannotListen(f"Cannot listen on {address}: {reason}", host=address.host, port=address.port)


def _has_errno(error: Exception, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number
