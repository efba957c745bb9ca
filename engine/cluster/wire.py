"""The socket between the engine and a worker on another machine: who may connect, and how its loss is noticed.

A client shows a token first that only the engine and the actor know, and that is good for one connection. It
travels over the network as it is, and so does everything after it: nothing here is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time

TOKEN_BYTES = 32
_TOKEN_PATIENCE_S = 3.0
SILENCE_S = 10
"""A peer that acknowledges nothing for so long is gone."""


def new_token() -> bytes:
    """A token for one connection."""
    return secrets.token_bytes(TOKEN_BYTES)


class Listener:
    """Listens on one address of this machine, on a port that the system chooses, for one peer with the token."""

    def __init__(self, address: str, token: bytes) -> None:
        """Raises OSError where the address is none of this machine's."""
        self._token = token
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=4)

    @property
    def port(self) -> int:
        """The port."""
        return int(self._socket.getsockname()[1])

    def accept(self, patience_s: float) -> socket.socket:
        """The first peer that shows the token; others are turned away. Closes the listener. Raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                try:
                    peer, _ = self._socket.accept()
                except TimeoutError:
                    break
                if self._has_token(peer):
                    _watch(peer)
                    return peer
                peer.close()
            raise TimeoutError(f"the engine did not connect within {patience_s:g} s")
        finally:
            self.close()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _has_token(self, peer: socket.socket) -> bool:
        """Return whether it shows the token, soon and in full."""
        deadline, shown = time.monotonic() + _TOKEN_PATIENCE_S, b""
        with contextlib.suppress(OSError):
            while len(shown) < TOKEN_BYTES and (left_s := deadline - time.monotonic()) > 0:
                peer.settimeout(left_s)
                chunk = peer.recv(TOKEN_BYTES - len(shown))
                if not chunk:
                    break
                shown += chunk
        return hmac.compare_digest(shown, self._token)


def dial(address: str, port: int, token: bytes, patience_s: float) -> socket.socket:
    """Connect and show the token. Blocks; raises OSError."""
    sock = socket.create_connection((address, port), patience_s)
    try:
        sock.sendall(token)
        _watch(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _watch(sock: socket.socket) -> None:
    """Send at once what is written; have the kernel notice within seconds that the peer's machine is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 3),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        if hasattr(socket, option):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
