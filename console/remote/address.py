"""Where an instance is. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from engine.errors import InvalidRequest

DEFAULT_URL = "http://127.0.0.1:8000"


class Address(msgspec.Struct, frozen=True):
    """url: without a slash at its end.  name: "host:port", as a person knows it."""

    url: str
    name: str


def address_of(text: str) -> Address:
    """Of "host", "host:port" or a URL; raises InvalidRequest with one sentence."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{text} is no address of an instance: {error}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{text} is no address of an instance; give one as {DEFAULT_URL}", param="url")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest(f"{text} says more than where the instance is; a key is given as --api-key", param="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None:
        port = 443 if parts.scheme == "https" else 80 if "://" in text else 8000
    path = parts.path.rstrip("/")
    return Address(f"{parts.scheme}://{host}:{port}{path}", f"{host}:{port}{path}")
