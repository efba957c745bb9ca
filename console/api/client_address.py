"""Which address a request comes from: that of its connection, or what a trusted proxy says who asked it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_CLIENT = web.RequestKey("client_address", str)
_HEADER = "X-Forwarded-For"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def client_address(request: web.Request) -> str:
    """The address that a request comes from, as `resolving` found it."""
    return request.get(_CLIENT) or ""


def resolving(proxies: Sequence[Network]) -> Middleware:
    """Finds out who asks, for all that tells clients apart: log, limits, turns. proxies: those whose word is taken."""

    @web.middleware
    async def resolve(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[_CLIENT] = _resolved(request.remote or "", request.headers.getall(_HEADER, ()), proxies)
        return await handler(request)

    return resolve


def _resolved(peer: str, forwarded: Iterable[str], proxies: Sequence[Network]) -> str:
    """The last address that no trusted proxy has: each adds behind the others whom it was asked by, and what stands
    before that anybody may have written."""
    hops = [hop.strip() for line in forwarded for hop in line.split(",")]
    address = _plain(peer)
    while hops and _is_in(address, proxies):
        hop = _plain(hops.pop())
        if _parsed(hop) is None:
            break
        address = hop
    return address


def _plain(address: str) -> str:
    """Without a port, and IPv4 as such where it came over IPv6."""
    if address.startswith("["):
        address = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        address = address.partition(":")[0]
    parsed = _parsed(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return address if parsed is None else str(mapped or parsed)


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    parsed = _parsed(address)
    return parsed is not None and any(parsed in network for network in networks)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
