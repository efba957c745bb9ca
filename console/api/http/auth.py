"""Authentication: which requests are allowed, by their API key or because they come from this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from console.api.http.client_address import client_address, is_local_address, peer_of
from console.api.http.errors import Forbidden, NotAuthorized
from console.api.http.guard import is_own_host, requested_hosts
from console.api.http.keys import Key, Keys
from console.api.http.scopes import ADMIN, allows, describe_scopes, is_open, is_read_only, scope_needed
from console.api.http.traffic import Traffic, call_of
from console.link.api import SETTINGS_KEY

_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Decides whether requests need a key and whether keys are still valid.

    is_exposed: returns whether other machines reach the server, which must not be open to all then.
    admin_remote: True if admin requests are accepted from other machines.
    """

    keys: Keys
    is_exposed: Callable[[], bool]
    admin_remote: bool

    @property
    def key_required(self) -> bool:
        """True if a request needs a key. After another program revoked the last key of an exposed server, none is
        valid."""
        return self.keys.required or self.is_exposed()

    def allows(self, key: Key | None) -> bool:
        """Return whether a request with that key (None: without one) would still be allowed."""
        return not self.key_required if key is None else self.keys.is_valid(key)


def auth_middleware(traffic: Traffic, authenticator: Authenticator) -> Middleware:
    """Require a key with the right scope, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, where keys exist. Without
    keys, admin endpoints answer only requests from this machine."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        key: Key | None = None
        if not is_open(request.path):
            if authenticator.key_required:
                key = await _authorized_key(request, authenticator.keys)
            if request.path.startswith(ADMIN):
                _check_admin_access(request, key, authenticator.admin_remote)
        call = call_of(request)
        traffic.admit(call, "" if key is None else key.name)
        call.is_allowed = partial(authenticator.allows, key)
        if key is None:
            return await handler(request)
        call.scopes = key.scopes
        with key.limiter.admit(key.name) if _is_limited(request) else nullcontext():
            authenticator.keys.record_usage(key, requests=1)
            try:
                return await handler(request)
            finally:
                authenticator.keys.record_usage(key, prompt_tokens=call.prompt_tokens, output_tokens=call.output_tokens)
                key.limiter.record_tokens(call.prompt_tokens + call.output_tokens)

    return authorize


async def _authorized_key(request: web.Request, keys: Keys) -> Key:
    """Return the request's key. Raises NotAuthorized without a valid one, Forbidden where its scopes do not suffice."""
    presented = _presented_key(request)
    if presented is None:
        raise NotAuthorized("This server needs an API key: send it as Authorization: Bearer KEY")
    key = await keys.find(presented)
    if key is None:
        raise NotAuthorized("The API key is not valid")
    needed = scope_needed(request.method, request.path)
    if not allows(key.scopes, needed):
        call = f"{request.method} {request.path}"
        raise Forbidden(f"The key {key.name} may only {describe_scopes(key.scopes)}; {call} needs the scope {needed}")
    return key


def client_of(request: web.Request) -> str:
    """Return the client for fair sharing of the workers: the name of its own key, else its address.

    The key of the settings is shared by all clients, so it does not count. Nor does anything that a client claims (a
    key where none is required, `user`): it could claim something else each time to get more than its share.
    """
    key = call_of(request).key
    return key if key and key != SETTINGS_KEY else client_address(request)


def tenant_of(request: web.Request) -> str:
    """Return the tenant of the prefix cache that a request belongs to: by its key; "" without one."""
    key = call_of(request).key
    return f"key:{key}" if key else ""


def may_load(request: web.Request) -> bool:
    """Return whether a request may have a model loaded by its name: by the scopes of its key, else if it comes from a
    program of this machine."""
    call = call_of(request)
    return allows(call.scopes, "load") if call.key else is_local_program(request)


def is_local_program(request: web.Request) -> bool:
    """Return whether a program on this machine sent it for itself: neither a proxy for another client, nor a browser
    for a page of another site (pages send Origin; one whose name resolves to this address sends that name as Host)."""
    ours = all(is_own_host(name, ()) for name in requested_hosts(request))
    return ours and "Origin" not in request.headers and _is_local_connection(request)


def _check_admin_access(request: web.Request, key: Key | None, remote: bool) -> None:
    """Raise Forbidden for an admin request from an address that may not send one."""
    if key is None and not is_local_program(request):
        raise Forbidden("Without an API key, admin requests are accepted from this machine only: set --api-key-file")
    if not remote and not _is_local_connection(request):
        raise Forbidden("Admin requests are accepted from this machine only: --admin-remote allows others")


def _is_limited(request: web.Request) -> bool:
    """Return whether the limits of a key apply to the request: it asks a model to work."""
    return scope_needed(request.method, request.path) == "use" and not is_read_only(request.method, request.headers)


def _presented_key(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("X-API-Key")


def _is_local_connection(request: web.Request) -> bool:
    """Return whether it comes from this machine, and not through a proxy."""
    return is_local_address(peer_of(request)) and not any(name in request.headers for name in _PROXIED)
