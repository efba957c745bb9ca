"""Ports for programs that are to listen later than they are told where."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_PORTS = range(20_000, 30_000)
"""Below those that systems give out by themselves: nobody who asks for any port gets one of these meanwhile."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    while True:
        port = random.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
