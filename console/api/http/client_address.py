"""The address of a request's client: that of its connection, or the one that a trusted proxy forwards."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.settings.addresses import is_loopback

_CLIENT = web.RequestKey("client_address", str)
_HEADER = "X-Forwarded-For"
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
UNIX = "unix"
"""Address of clients of a Unix socket; a proxy there is trusted like one at 127.0.0.1."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def client_address(request: web.Request) -> str:
    """Return the client's address that `client_address_middleware` resolved."""
    return request.get(_CLIENT) or ""


def peer_of(request: web.Request) -> str:
    """Return the address at the other end of the connection, UNIX for a Unix socket."""
    transport = request.transport
    sock = None if transport is None else transport.get_extra_info("socket")
    return UNIX if sock is not None and sock.family == socket.AF_UNIX else request.remote or ""


def is_local_address(address: str) -> bool:
    """Return whether a client is a program on this machine."""
    return address == UNIX or is_loopback(address)


def client_address_middleware(proxies: Sequence[Network]) -> Middleware:
    """Resolve the client's address for logs, limits and fair sharing. proxies: networks whose X-Forwarded-For is
    trusted."""

    @web.middleware
    async def resolve(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_CLIENT] = _resolve(peer_of(request), request.headers.getall(_HEADER, ()), proxies)
        return await handler(request)

    return resolve


def _resolve(peer: str, forwarded: Iterable[str], proxies: Sequence[Network]) -> str:
    """Return the last address that is not a trusted proxy's. Each proxy appends the address it was called from; entries
    before the first untrusted one may be forged."""
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    address = _without_port(peer)
    while hops and _is_trusted(address, proxies):
        hop = _without_port(hops.pop())
        if _parse(hop) is None:
            break
        address = hop
    return address


def _without_port(address: str) -> str:
    """Remove the port, and map IPv4-in-IPv6 addresses to IPv4."""
    if address.startswith("["):
        address = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        address = address.partition(":")[0]
    parsed = _parse(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return address if parsed is None else str(mapped or parsed)


def _is_trusted(address: str, proxies: Sequence[Network]) -> bool:
    parsed = _LOOPBACK if address == UNIX else _parse(address)
    return parsed is not None and any(parsed in network for network in proxies)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
