"""The dialects that there are, which of them are on, and which one a request is in.

A dialect is a package of this folder that declares a `DIALECT`; nothing else names it. One that is switched off answers
every one of its routes with a 404 that says so. Several may have an endpoint at one path: the body decides between
them. What operators and their tools ask (health, metrics, admin) belongs to no dialect.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from console.api import dialects as packages
from console.api.context import ApiContext
from console.api.dialects.base import Dialect
from console.api.http.errors import ErrorFormatter, envelope
from console.api.http.request_body import document_of
from console.api.http.scopes import READ_METHODS
from console.api.http.traffic import call_of
from console.api.requests.schemas import attach_specs, endpoint_specs
from console.link.api import DialectReading
from engine.errors import InvalidRequest

_PATTERN = re.compile(r"\{(\w+):[^}]*\}")
"""A variable part of a path, and its name."""


Place = tuple[str, str]
"""Method and path of an endpoint."""


def discover() -> tuple[Dialect, ...]:
    """Import the packages of this folder and return their dialects by rank. Raises ValueError for two of one name."""
    names = [each.name for each in pkgutil.iter_modules(packages.__path__) if each.ispkg]
    dialects: list[Dialect] = [import_module(f"{packages.__name__}.{name}").DIALECT for name in names]
    if twice := {dialect.name for dialect in dialects if [each.name for each in dialects].count(dialect.name) > 1}:
        raise ValueError(f"two packages declare a dialect called {', '.join(sorted(twice))}")
    return tuple(sorted(dialects, key=lambda dialect: (dialect.rank, dialect.name)))


class DialectRegistry:
    """The dialects of one server. All are on at first, but those that `switch_off_initially` names."""

    def __init__(self, context: ApiContext, dialects: Sequence[Dialect]) -> None:
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._routes = {
            dialect.name: [route for endpoint in dialect.endpoints for route in endpoint(context).routes()]
            for dialect in dialects
        }
        self._at: dict[Place, dict[str, web.RouteDef]] = {}
        self._of_path: dict[str, Dialect] = {}
        for name, routes in self._routes.items():
            for route in routes:
                self._at.setdefault((route.method, _plain(route)), {})[name] = route
                self._of_path.setdefault(_plain(route), self._dialects[name])
        self._off: frozenset[str] = frozenset()
        self._switched = False

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all dialects, each place once."""
        return [
            first if len(here) == 1 else web.route(first.method, first.path, _dispatcher(here))
            for here in self._at.values()
            for first in [next(iter(here.values()))]
        ]

    def error_formatter(self, request: web.Request) -> ErrorFormatter:
        """Return the formatter of errors for the request, as far as it can be chosen before the body is read."""
        if here := self._candidates(request):
            return here[0].format_error
        if request.match_info.http_exception is None:
            return envelope
        answering = next((each for each in self._dialects.values() if each.answers_for(request)), None)
        dialect = answering or self._of_path.get(request.path)
        return envelope if dialect is None else dialect.format_error

    def at(self, method: str, path: str) -> list[Dialect]:
        """Return the dialects that have an endpoint at a place."""
        return [self._dialects[name] for name in self._at.get((method, path), {})]

    async def of(self, request: web.Request) -> Dialect | None:
        """Return the dialect that the request is in, None where it is in none; where several have an endpoint there,
        its body decides, which is read then. A body that is no JSON object is refused by the first of them."""
        here = self._candidates(request)
        if len(here) < 2:
            return here[0] if here else None
        if request.method in READ_METHODS:
            return self._first_on(here)
        try:
            body = await document_of(request)
        except InvalidRequest:
            return here[0]
        claiming = [dialect for dialect in here if dialect.claims is not None and dialect.claims(body)]
        return self._first_on(claiming or [dialect for dialect in here if dialect.claims is None] or here)

    def is_on(self, dialect: Dialect) -> bool:
        """Return whether a dialect is answered."""
        return dialect.name not in self._off

    def switch(self, name: str, on: bool) -> None:
        """Answer a dialect or not, from the next request on; raises InvalidRequest where there is none of that name."""
        if name not in self._dialects:
            names = ", ".join(self._dialects)
            raise InvalidRequest(f"Unknown dialect {name}; available: {names}", param="name")
        self._switched = True
        self._off = self._off - {name} if on else self._off | {name}

    def switch_off_initially(self, names: Iterable[str]) -> None:
        """Switch these off, unless any dialect has been switched before; raises as `switch` does."""
        if not self._switched:
            self._switched = True
            for name in names:
                self.switch(name, False)

    def readings(self, requests: Mapping[str, int]) -> tuple[DialectReading, ...]:
        """Return all dialects as the console shows them. requests: so far, by name."""
        return tuple(
            DialectReading(
                name=name,
                title=dialect.title,
                routes=tuple(dict.fromkeys(map(_plain, self._routes[name]))),
                on=self.is_on(dialect),
                requests=requests.get(name, 0),
                example_path=dialect.example.path,
                example_body=dict(dialect.example.body),
            )
            for name, dialect in self._dialects.items()
        )

    def operation(self, request: web.Request, dialect: Dialect) -> str:
        """Return what the request asks a model for in that dialect, as OpenTelemetry names it."""
        specs = endpoint_specs(self._here(request)[dialect.name].handler)
        return next((spec.operation for spec in specs), "text_completion")

    def request_id_headers(self, request: web.Request) -> list[str]:
        """Return the headers besides X-Request-Id in which the client looks for the id of its request."""
        dialects = (dialect for dialect in self._dialects.values() if dialect.is_asked_by(request))
        return [dialect.request_id_header for dialect in dialects if dialect.request_id_header]

    @property
    def cors_headers(self) -> list[str]:
        """Headers of the dialects' own that pages of other origins may send."""
        names = [name for dialect in self._dialects.values() for name in (dialect.header, *dialect.cors_headers)]
        return list(dict.fromkeys(filter(None, names)))

    def _here(self, request: web.Request) -> Mapping[str, web.RouteDef]:
        """Return the endpoints at the request's place by dialect, by rank."""
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        return {} if resource is None else self._at.get((method, resource.canonical), {})

    def _candidates(self, request: web.Request) -> list[Dialect]:
        """Return the dialects that the request may be in, by its place and headers."""
        here = [self._dialects[name] for name in self._here(request)]
        if len(here) < 2:
            return here
        signed = [dialect for dialect in here if dialect.is_asked_by(request)]
        return signed or [dialect for dialect in here if not dialect.header]

    def _first_on(self, dialects: Sequence[Dialect]) -> Dialect:
        """Return the first that is on, else the first."""
        return next(filter(self.is_on, dialects), dialects[0])


def _dispatcher(here: Mapping[str, web.RouteDef]) -> Handler:
    """Return a handler that passes a request to the dialect that it is in."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        handler = cast(Handler, here[call_of(request).dialect].handler)
        return await handler(request)

    return attach_specs(pass_on, *(spec for route in here.values() for spec in endpoint_specs(route.handler)))


def _plain(route: web.RouteDef) -> str:
    """Return the path as aiohttp's resources name it."""
    return _PATTERN.sub(r"{\1}", route.path)
