"""The row by which a dialect declares itself: `DIALECT` in the `__init__` of its package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from console.api.context import ApiContext
from console.api.http.errors import ErrorFormatter, envelope


class Endpoint(Protocol):
    """A class with some of a dialect's endpoints."""

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""


@dataclass(frozen=True, slots=True)
class Example:
    """A request that the dialect answers: its path and its body, but for the model's name."""

    path: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """An API that clients know from another server.

    name: for settings and the wire; title: for people.  rank: its place in every list; where several dialects have an
    endpoint, the first of them that is on answers requests without a body.
    endpoints: classes of its endpoints.  example: the request that the console shows as a curl line.
    format_error: makes the JSON body of an error, in the shape that its clients read.
    claims: returns whether a JSON body is in this dialect, where several have an endpoint at one path; a dialect
    without it takes the bodies that no other claims.
    header: sent by this dialect's clients alone. Where several have an endpoint at one path, a request with it is in
    this dialect, and no other request is.
    root: a path; what is missing at or under it, or anywhere for a request with `header`, is refused in this dialect.
    request_id_header: where clients that send `header` look for the id of their request, besides X-Request-Id.
    cors_headers: that pages of other origins may send, besides `header`.
    unnamed_models: names that its clients send for "the one model that there is".
    """

    name: str
    title: str
    endpoints: tuple[Callable[[ApiContext], Endpoint], ...]
    example: Example
    rank: int = 100
    format_error: ErrorFormatter = envelope
    claims: Callable[[Mapping[str, object]], bool] | None = None
    header: str = ""
    root: str = ""
    request_id_header: str = ""
    cors_headers: tuple[str, ...] = ()
    unnamed_models: frozenset[str] = frozenset()

    def is_asked_by(self, request: web.Request) -> bool:
        """Return whether the request's headers say that its client speaks this dialect."""
        return bool(self.header) and self.header in request.headers

    def answers_for(self, request: web.Request) -> bool:
        """Return whether this dialect refuses a request to a path that does not exist."""
        is_under_root = bool(self.root) and f"{request.path}/".startswith(f"{self.root}/")
        return is_under_root or self.is_asked_by(request)
