"""The dialects: ways of asking that clients know from elsewhere. The table here is all that knows them by name.

A dialect that is switched off answers every one of its routes with a 404 that says so. What operators and their tools
ask (health, metrics, admin) is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from console.api.chat import Chat
from console.api.completions import Completions
from console.api.context import ApiContext
from console.api.generate import Generate
from console.api.models import Models
from console.links.api import DialectReading
from engine.errors import InvalidRequest


class Endpoint(Protocol):
    """A module's endpoints."""

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """name: for orders; title: for people; endpoints: what makes them."""

    name: str
    title: str
    endpoints: tuple[Callable[[ApiContext], Endpoint], ...]


DIALECTS: tuple[Dialect, ...] = (
    Dialect("openai", "OpenAI", (Models, Completions, Chat)),
    Dialect("generate", "EricLLM and vLLM", (Generate,)),
)

_PATTERN = re.compile(r"\{(\w+):[^}]*\}")
"""A part of a path that may be many things, and which."""


class Dialects:
    """Which dialects there are, and which of them are on. All are at first."""

    def __init__(self, context: ApiContext, dialects: Sequence[Dialect] = DIALECTS) -> None:
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._routes = {
            dialect.name: [route for endpoint in dialect.endpoints for route in endpoint(context).routes()]
            for dialect in dialects
        }
        self._of_path = {_plain(route): dialect for dialect in dialects for route in self._routes[dialect.name]}
        self._off: frozenset[str] = frozenset()

    def routes(self) -> list[web.RouteDef]:
        """Those of all dialects."""
        return [route for routes in self._routes.values() for route in routes]

    def of(self, request: web.Request) -> Dialect | None:
        """The dialect that the request is in, None where it is in none."""
        resource = request.match_info.route.resource
        return None if resource is None else self._of_path.get(resource.canonical)

    def is_on(self, dialect: Dialect) -> bool:
        """Whether it is answered."""
        return dialect.name not in self._off

    def switch(self, name: str, on: bool) -> None:
        """Answer a dialect or not, from the next request on; raises InvalidRequest where there is none of that name."""
        if name not in self._dialects:
            known = ", ".join(self._dialects)
            raise InvalidRequest(f"There is no dialect called {name}; there are: {known}", param="name")
        self._off = self._off - {name} if on else self._off | {name}

    def readings(self, requests: Mapping[str, int]) -> tuple[DialectReading, ...]:
        """All of them. requests: so far, by name."""
        return tuple(
            DialectReading(
                name=name,
                title=dialect.title,
                routes=tuple(dict.fromkeys(map(_plain, self._routes[name]))),
                on=self.is_on(dialect),
                requests=requests.get(name, 0),
            )
            for name, dialect in self._dialects.items()
        )


def _plain(route: web.RouteDef) -> str:
    """The path as aiohttp's resources name it."""
    return _PATTERN.sub(r"{\1}", route.path)
