"""Who can reach an address that is listened on. Pure.

Besides host names and IP addresses: "unix:PATH" is a socket in the file system, "*" every address of both IP versions.
"""

from __future__ import annotations

import ipaddress
import os
import re
from functools import lru_cache

from engine.models.files import home_expanded

EVERYWHERE = "*"
_UNIX = "unix:"
_NAME = re.compile(r"\w([\w.-]*\w)?\.?")
_NUMBERS = re.compile(r"[\d.]+")
_MAX_PATH_BYTES = 107
"""Of Linux; macOS takes three fewer, and says so itself."""


def unix_path(host: str) -> str:
    """The path of a socket in the file system; "" for any other address."""
    return host.removeprefix(_UNIX) if host.startswith(_UNIX) else ""


def checked_host(host: str) -> str:
    """The address as it is listened on: without blanks, and without the brackets that an IPv6 address has in a URL.
    Raises ValueError for what is none."""
    host = host.strip()
    if host == _UNIX:
        raise ValueError("a socket needs a path, such as unix:/run/ericllm/http.sock")
    if path := unix_path(host):
        if len(os.fsencode(home_expanded(path))) > _MAX_PATH_BYTES:
            raise ValueError(f"the path of a socket has max {_MAX_PATH_BYTES} bytes")
        return host
    if not host:
        raise ValueError("enter an address, such as 127.0.0.1 or 0.0.0.0")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if "/" in host:
            raise ValueError("enter the address only, without scheme or path") from None
        if ":" in host:
            raise ValueError("enter the address only; the port is a separate setting") from None
        if host != EVERYWHERE and (_NAME.fullmatch(host) is None or _NUMBERS.fullmatch(host)):
            raise ValueError("not an address or host name") from None
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return bare


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine reach `host`; names but localhost count as more."""
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
