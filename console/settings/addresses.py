"""Who can reach an address that is listened on. Pure.

Besides host names and IP addresses: "unix:PATH" is a socket in the file system, "*" every address of both IP versions.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

EVERYWHERE = "*"
_UNIX = "unix:"


def unix_path(host: str) -> str:
    """The path of a socket in the file system; "" for any other address."""
    return host.removeprefix(_UNIX) if host.startswith(_UNIX) else ""


def checked_host(host: str) -> str:
    """The address as it stands; raises ValueError for one that cannot be listened on."""
    if host == _UNIX:
        raise ValueError("a socket needs a path, as unix:/run/ericllm/http.sock")
    return host


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach `host`; a name other than localhost is taken for more than that."""
    if host == "localhost" or unix_path(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def reachable(host: str) -> str:
    """The address by which this machine itself reaches a server on `host`: loopback where it listens on all."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", EVERYWHERE: "127.0.0.1"}.get(host, host)
