"""Who may do what they ask for: a key of theirs says so, or that they are on this machine."""

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
from console.api.http.scopes import ADMIN, allows, in_words, is_open, only_looks, scope_needed
from console.api.http.traffic import Traffic, call_of
from console.link.api import SETTINGS_KEY

_PROXIED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


@dataclass(frozen=True, slots=True)
class Authenticator:
    """keys: those that are valid.  is_exposed: whether others reach the server, which must not be open to all then.

    admin_remote: whether admin requests are taken from elsewhere.
    """

    keys: Keys
    is_exposed: Callable[[], bool]
    admin_remote: bool

    @property
    def key_required(self) -> bool:
        """Whether a request needs a key. Where the last one was revoked from outside, there is none that would do."""
        return self.keys.required or self.is_exposed()

    def allows(self, key: Key | None) -> bool:
        """Whether who was let in with that key, or without any, still would be."""
        return not self.key_required if key is None else self.keys.holds(key)


def auth_middleware(traffic: Traffic, door: Authenticator) -> Middleware:
    """Asks for a key that may do what is asked, as `Authorization: Bearer KEY` or `X-API-Key: KEY`, where there are
    keys. Where there are none, admin endpoints answer on this machine alone."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        key: Key | None = None
        if not is_open(request.path):
            if door.key_required:
                key = await _allowed(request, door.keys)
            if request.path.startswith(ADMIN):
                _check_place(request, key, door.admin_remote)
        call = call_of(request)
        traffic.admit(call, "" if key is None else key.name)
        call.is_allowed = partial(door.allows, key)
        if key is None:
            return await handler(request)
        with key.gate.passed(key.name) if _asks_model(request) else nullcontext():
            door.keys.note(key, requests=1)
            try:
                return await handler(request)
            finally:
                door.keys.note(key, prompt_tokens=call.prompt_tokens, output_tokens=call.output_tokens)
                key.gate.used(call.prompt_tokens + call.output_tokens)

    return authorize


async def _allowed(request: web.Request, keys: Keys) -> Key:
    """The request's key; raises NotAuthorized where it has none that is valid, Forbidden where that may not do so."""
    given = _given_key(request)
    if given is None:
        raise NotAuthorized("This server needs a key: send it as Authorization: Bearer KEY")
    key = await keys.find(given)
    if key is None:
        raise NotAuthorized("That key is not valid here")
    needed = scope_needed(request.method, request.path)
    if not allows(key.scopes, needed):
        asked = f"{request.method} {request.path}"
        raise Forbidden(f"The key {key.name} may only {in_words(key.scopes)}; {asked} needs the scope {needed}")
    return key


def client_of(request: web.Request) -> str:
    """Who asks, as far as waiting clients share the workers fairly: the name of the key that was made for it, else the
    address that the request comes from.

    The key of the settings tells no clients apart, for all of them have it; and what a client says of itself (a key
    that nobody asked for, `user`) it could say differently each time, to be taken for many.
    """
    key = call_of(request).key
    return key if key and key != SETTINGS_KEY else client_address(request)


def tenant_of(request: web.Request) -> str:
    """Tenant of the prefix cache that a request belongs to: the name of the key that it was let in with; "" without."""
    key = call_of(request).key
    return f"key:{key}" if key else ""


def _check_place(request: web.Request, key: Key | None, remote: bool) -> None:
    """Raise Forbidden for an admin request that may not come from there."""
    if key is None and not _is_local(request):
        raise Forbidden("Without an API key, admin requests are taken from this machine alone: set --api-key-file")
    if not remote and not _is_near(request):
        raise Forbidden("Admin requests are taken from this machine alone here: --admin-remote takes them from others")


def _asks_model(request: web.Request) -> bool:
    """Whether it is work of the kind that a key's limits are about."""
    return scope_needed(request.method, request.path) == "use" and not only_looks(request.method, request.headers)


def _given_key(request: web.Request) -> str | None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("X-API-Key")


def _is_local(request: web.Request) -> bool:
    """Whether a program on this machine asks for itself: not a proxy for somebody else, and not a browser for a page
    from elsewhere (pages send Origin; one whose name was pointed at this address sends that name as Host)."""
    ours = all(is_own_host(name, ()) for name in requested_hosts(request))
    return ours and "Origin" not in request.headers and _is_near(request)


def _is_near(request: web.Request) -> bool:
    """Whether it comes from this machine, and not through a proxy for somebody else."""
    return is_local_address(peer_of(request)) and not any(name in request.headers for name in _PROXIED)
