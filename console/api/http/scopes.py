"""Scopes of API keys, and the scope that each request needs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container

from console.link.api import Scope

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Health checks of load balancers, which have no key."""

_PAGES = frozenset({"/chat", "/docs", "/openapi.json"})
_PAGE_FILES = ("/chat/", "/docs/")

ADMIN = "/admin/"
"""Endpoints for operators and monitoring."""

SCOPES: tuple[Scope, ...] = ("use", "load", "watch", "admin")

ALL: tuple[Scope, ...] = ("admin",)
"""Scopes of a key that may do everything."""

READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

_WATCHED = frozenset({"/metrics"})
_UNLOADING = ("/unload", "/api/models/unload")
_EVERY_KEY = frozenset({"/"})
_MAY = {"use": "use models", "load": "load models by name", "watch": "read status", "admin": "full control"}


def is_open(path: str) -> bool:
    """Return whether no key is needed: for health checks, and pages, which are the same for everyone."""
    return path in OPEN_PATHS or path in _PAGES or path.startswith(_PAGE_FILES)


def scope_needed(method: str, path: str) -> Scope | None:
    """Return the scope that a request needs (`admin` always suffices); None if any key will do."""
    if path.startswith(ADMIN):
        return "watch" if method in READ_METHODS else "admin"
    if path in _WATCHED:
        return "watch"
    if path in _UNLOADING or path.startswith(f"{_UNLOADING[1]}/"):
        return "load"
    return None if path in _EVERY_KEY and method in READ_METHODS else "use"


def is_read_only(method: str, headers: Container[str]) -> bool:
    """Return whether a request changes nothing. A websocket, which may, begins as a GET. headers: case-insensitive."""
    return method in READ_METHODS and "Upgrade" not in headers


def allows(scopes: Collection[Scope], needed: Scope | None) -> bool:
    """Return whether a key with `scopes` may do what needs `needed`."""
    return needed is None or needed in scopes or "admin" in scopes


def describe_scopes(scopes: Collection[Scope]) -> str:
    """Return the scopes as a phrase, such as "ask models and watch"."""
    if "admin" in scopes:
        return _MAY["admin"]
    return " and ".join(_MAY[scope] for scope in SCOPES if scope in scopes)
