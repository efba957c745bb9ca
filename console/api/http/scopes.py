"""What each scope of a key lets it do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container

from console.link.api import Scope

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What load balancers ask, which hold no key."""

_PAGES = frozenset({"/chat", "/docs", "/openapi.json"})
_PAGE_FILES = ("/chat/", "/docs/")

ADMIN = "/admin/"
"""What operators and those who watch alone may ask."""

SCOPES: tuple[Scope, ...] = ("use", "watch", "admin")

ALL: tuple[Scope, ...] = ("admin",)
"""The scopes of a key that may do everything."""

LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""

_WATCHED = frozenset({"/metrics"})
_EVERY_KEY = frozenset({"/"})
_MAY = {"use": "ask models", "watch": "watch", "admin": "do everything"}


def is_open(path: str) -> bool:
    """Whether no key is needed: for what load balancers ask, and for pages, which are the same for everybody."""
    return path in OPEN_PATHS or path in _PAGES or path.startswith(_PAGE_FILES)


def scope_needed(method: str, path: str) -> Scope | None:
    """The scope that a request needs besides `admin`, which is enough for all; None where any key will do."""
    if path.startswith(ADMIN):
        return "watch" if method in LOOKING else "admin"
    if path in _WATCHED:
        return "watch"
    return None if path in _EVERY_KEY and method in LOOKING else "use"


def only_looks(method: str, headers: Container[str]) -> bool:
    """Whether a request asks for no work. A websocket, which does, begins as a GET. headers: case-insensitive."""
    return method in LOOKING and "Upgrade" not in headers


def allows(scopes: Collection[Scope], needed: Scope | None) -> bool:
    """Whether a key with `scopes` may do what needs `needed`."""
    return needed is None or needed in scopes or "admin" in scopes


def in_words(scopes: Collection[Scope]) -> str:
    """ "ask models and watch"."""
    if "admin" in scopes:
        return _MAY["admin"]
    return " and ".join(_MAY[scope] for scope in SCOPES if scope in scopes)
