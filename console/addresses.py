"""Who can reach an address that is listened on. Pure."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach `host`; a name other than localhost is taken for more than that."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def reachable(host: str) -> str:
    """The address by which this machine itself reaches a server on `host`: loopback where it listens on all."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
