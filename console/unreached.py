"""Why a server could not be reached, in few words."""

from __future__ import annotations

import aiohttp


def reason(error: BaseException) -> str:
    """Of an error of aiohttp's client, or of a socket."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return f"its certificate is not trusted: {why}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "there is no such host"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "nobody listens there" if isinstance(error.os_error, ConnectionRefusedError) else str(error.os_error)
    if isinstance(error, aiohttp.InvalidURL):
        return "that is no URL"
    return "the connection broke off"
