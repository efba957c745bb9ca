"""The address that the server listens on: opening, moving without losing a request, errors with what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from console.api.http.errors import CannotListen
from console.settings.addresses import EVERYWHERE, unix_path
from engine.models.files import home_expanded

# Limit of open files: each connection is one.

WANTED_FILES = 65_536
"""Where the system allows it; a usual soft limit is 1024, which a process may raise itself."""

RESERVED_FILES = 256
"""For models, workers, keys and logs."""

MIN_CONNECTIONS = 64


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files up to `WANTED_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has limits of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Return how many connections leave enough files for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(
        MIN_CONNECTIONS, (WANTED_FILES if soft == resource.RLIM_INFINITY else min(soft, WANTED_FILES)) - RESERVED_FILES
    )


_UNIX_MASK = 0o117
"""umask of a socket's file: its owner and group may connect, no one else."""
_BACKLOG = 128
_LOCKED_S = 1.0
_LOCK_RETRY_S = 0.005


@dataclass(frozen=True, slots=True)
class Address:
    """port: 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return self.host if unix_path(self.host) else f"{self.host} port {self.port}"


class Listener:
    """The address at which an application accepts connections. tls: None for plain HTTP."""

    def __init__(self, runner: web.AppRunner, tls: ssl.SSLContext | None = None) -> None:
        self._runner = runner
        self._tls = tls
        self._site: web.BaseSite | None = None
        self._socket: socket.socket | None = None
        self._address: Address | None = None

    @property
    def address(self) -> Address | None:
        """Where it listens, with the actual port; None while it does not."""
        return self._address

    async def open(self, address: Address) -> None:
        """Listen. Raises CannotListen with the reason and what to do about it."""
        port = address.port
        try:
            sock = _own_socket(address)
            if sock is not None:
                site: web.BaseSite = web.SockSite(self._runner, sock, ssl_context=self._tls)
                port = 0 if unix_path(address.host) else sock.getsockname()[1]
            else:
                site = web.TCPSite(self._runner, address.host, address.port, ssl_context=self._tls)
        except (OSError, OverflowError) as error:
            raise _cannot_listen(error, address) from error
        try:
            await site.start()
        except (OSError, OverflowError, ValueError) as error:
            await _stop(site, sock)
            raise _cannot_listen(error, address) from error
        self._site, self._socket = site, sock
        self._address = Address(address.host, site.port if isinstance(site, web.TCPSite) else port)

    async def close(self) -> None:
        """Accept no more connections; open ones stay."""
        site, self._site = self._site, None
        sock, self._socket = self._socket, None
        self._address = None
        if site is not None:
            await _stop(site, sock)

    async def move(self, address: Address) -> None:
        """Listen at another address instead. Requests under way go on; idle connections are closed, so that no client
        stays that could not connect now.

        Two addresses with the same port may conflict, so the first is closed before the second is opened. Raises
        CannotListen where that fails: it listens at the old address then.
        """
        before, site, sock = self.address, self._site, self._socket
        server = self._runner.server
        connections = [] if server is None else server.connections
        same_port = before is not None and before.port == address.port
        if same_port:
            await self.close()
        try:
            await self.open(address)
        except CannotListen as error:
            raise await self._back_at(before, error) from error
        if site is not None and not same_port:
            await _stop(site, sock)
        for connection in connections:
            connection.close()

    async def _back_at(self, before: Address | None, reason: CannotListen) -> CannotListen:
        """Listen at the old address again; return the error, with how that went."""
        if before is None:
            return reason
        try:
            if self._site is None:
                await self.open(before)
        except CannotListen as error:
            return CannotListen(
                f"{reason.message}. Listening on the old address failed, too: {error.message}", **reason.details
            )
        return CannotListen(f"{reason.message}. Still listening on {before}", **reason.details)


def _own_socket(address: Address) -> socket.socket | None:
    """Return a socket for what asyncio does not offer: a Unix socket, or all addresses of both IP versions; None for
    any other address. Raises OSError, OverflowError."""
    if path := unix_path(address.host):
        return _UnixSocket(path)
    if address.host != EVERYWHERE:
        return None
    try:
        return socket.create_server(("::", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        if _has_errno(error, errno.EADDRINUSE) or _has_errno(error, errno.EACCES):
            raise
        return socket.create_server(("0.0.0.0", address.port))  # a machine without IPv6


async def _stop(site: web.BaseSite, sock: socket.socket | None) -> None:
    """Stop listening; a Unix socket's file is removed first, as another server may replace it once nothing listens."""
    if isinstance(sock, _UnixSocket):
        sock.remove()
    await site.stop()


class _UnixSocket(socket.socket):
    """A listening Unix socket that its owner and group may connect to.

    It replaces the socket file of a dead server, and nothing else; in the end only its own file is removed.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        super().__init__(socket.AF_UNIX)
        self._path = home_expanded(path)
        try:
            with _locked(self._path.parent):
                _remove_abandoned(self._path)
                before = os.umask(_UNIX_MASK)
                try:
                    self.bind(str(self._path))
                finally:
                    os.umask(before)
                self._inode = self._path.lstat().st_ino
                self.listen(_BACKLOG)  # with the folder locked: until it listens it looks abandoned
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Remove the file, unless another server's has replaced it. No other has its inode until it is closed."""
        with suppress(OSError), _locked(self._path.parent):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()


def _remove_abandoned(path: Path) -> None:
    """Remove the socket file of a dead server. Raises OSError where one listens, or the file is not a socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.ENOTSOCK, "no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            with suppress(BlockingIOError):  # its backlog is full, so it is alive
                probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "in use")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other servers that open sockets there. Raises OSError after `_LOCKED_S`."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # the folder may be writable, yet not readable
        yield
        return
    try:
        until = time.monotonic() + _LOCKED_S
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(opened)


def _cannot_listen(error: Exception, address: Address) -> CannotListen:
    reason = str(error)
    if path := unix_path(address.host):
        reason = _socket_file_problem(error, path)
    elif isinstance(error, socket.gaierror) or _has_errno(error, errno.EADDRNOTAVAIL):
        reason = f"{address.host} is not an address of this machine; choose another (--host)"
    elif _has_errno(error, errno.EADDRINUSE):
        reason = "port in use by another program; choose another (--port)"
    elif _has_errno(error, errno.EACCES):
        reason = f"no permission for port {address.port}; choose one above 1023 (--port)"
    elif isinstance(error, OverflowError):
        reason = "ports are 0 to 65535 (--port)"
    return CannotListen(f"Cannot listen on {address}: {reason}", host=address.host, port=address.port)


def _socket_file_problem(error: Exception, path: str) -> str:
    """Return why a Unix socket could not be opened."""
    if _has_errno(error, errno.EADDRINUSE):
        return "socket in use by another program; choose another file with --host"
    if _has_errno(error, errno.ENOTSOCK):
        return "the file exists and is not a socket"
    if _has_errno(error, errno.EAGAIN):
        return "the folder is locked by another program"
    if _has_errno(error, errno.ENOENT):
        return f"there is no folder {home_expanded(path).parent}"
    return getattr(error, "strerror", None) or str(error)


def _has_errno(error: Exception, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number
