"""The dialects: ways of asking that clients know from elsewhere. The table here is all that knows them by name.

A dialect that is switched off answers every one of its routes with a 404 that says so. Several may have an endpoint at
one path: the body decides whose it is. What operators and their tools ask (health, metrics, admin) is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from console.api.context import ApiContext
from console.api.dialects import kobold, ollama, textgen, tgi
from console.api.dialects.anthropic.errors import format_error as anthropic_error
from console.api.dialects.anthropic.messages import Messages
from console.api.dialects.anthropic.models import AnthropicModels
from console.api.dialects.ericllm.generate import Generate
from console.api.dialects.ericllm.tokenization import Utilities
from console.api.dialects.openai.chat import Chat
from console.api.dialects.openai.completions import Completions
from console.api.dialects.openai.embeddings import EmbeddingEndpoint
from console.api.dialects.openai.models import Models
from console.api.http.errors import ErrorFormatter, envelope
from console.api.http.request_body import document_of
from console.api.http.scopes import READ_METHODS
from console.api.http.traffic import call_of
from console.api.requests.schemas import attach_specs, endpoint_specs
from console.link.api import DialectReading
from engine.errors import InvalidRequest


class Endpoint(Protocol):
    """A module's endpoints."""

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """name: for orders; title: for people; endpoints: what makes them.

    format_error: makes the JSON body of an error, in the shape that the dialect's clients read.
    claims: whether a JSON body is in this dialect, asked where several have an endpoint at one path; without it, the
    dialect takes what no other claims.  header: one that this dialect's clients send, and no others: where several have
    an endpoint at one path, a request with it is in this dialect, and none without.
    root: the dialect speaks also of what is not there at or under this path, or, with its header, anywhere.
    """

    name: str
    title: str
    endpoints: tuple[Callable[[ApiContext], Endpoint], ...]
    format_error: ErrorFormatter = envelope
    claims: Callable[[Mapping[str, object]], bool] | None = None
    header: str = ""
    root: str = ""

    def is_asked_by(self, request: web.Request) -> bool:
        """Whether the request comes from a client of this dialect, as far as headers say."""
        return bool(self.header) and self.header in request.headers

    def answers_for(self, request: web.Request) -> bool:
        """Whether it says that there is nothing at the request's path."""
        beneath = bool(self.root) and f"{request.path}/".startswith(f"{self.root}/")
        return beneath or self.is_asked_by(request)


DIALECTS: tuple[Dialect, ...] = (
    Dialect("openai", "OpenAI", (Models, Completions, Chat, EmbeddingEndpoint)),
    Dialect("generate", "EricLLM and vLLM", (Generate, Utilities)),
    Dialect("tgi", "TGI", (tgi.GenerateEndpoints, tgi.InfoEndpoints), tgi.format_error, tgi.claims),
    Dialect("kobold", "KoboldAI", (kobold.Kobold,), kobold.format_error),
    Dialect("textgen", "text-generation-webui", (textgen.Textgen,), textgen.format_error, textgen.claims),
    Dialect(
        "anthropic",
        "Anthropic",
        (Messages, AnthropicModels),
        anthropic_error,
        header="anthropic-version",
        root="/v1/messages",
    ),
    Dialect("ollama", "Ollama", (ollama.Generate, ollama.Chat, ollama.Embed, ollama.ModelList), ollama.format_error),
)

_PATTERN = re.compile(r"\{(\w+):[^}]*\}")
"""A part of a path that may be many things, and which."""


Place = tuple[str, str]
"""Method and path of an endpoint."""


class DialectRegistry:
    """Which dialects there are, and which of them are on: all at first, but those that `begin_without` names."""

    def __init__(self, context: ApiContext, dialects: Sequence[Dialect] = DIALECTS) -> None:
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
        self._begun = False

    def routes(self) -> list[web.RouteDef]:
        """Those of all dialects, each place once."""
        return [
            first if len(here) == 1 else web.route(first.method, first.path, _shared(here))
            for here in self._at.values()
            for first in [next(iter(here.values()))]
        ]

    def error_formatter(self, request: web.Request) -> ErrorFormatter:
        """How to put an error to whoever asks, as far as that is known before the body is read."""
        if here := self._asked(request):
            return here[0].format_error
        if request.match_info.http_exception is None:
            return envelope
        answering = next((each for each in self._dialects.values() if each.answers_for(request)), None)
        known = answering or self._of_path.get(request.path)
        return envelope if known is None else known.format_error

    def at(self, method: str, path: str) -> list[Dialect]:
        """The dialects that have an endpoint at a place."""
        return [self._dialects[name] for name in self._at.get((method, path), {})]

    async def of(self, request: web.Request) -> Dialect | None:
        """The dialect that the request is in, None where it is in none; where several have an endpoint there, its body
        decides, which is read then. A body that is no JSON object is the first one's to refuse."""
        here = self._asked(request)
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
        """Whether it is answered."""
        return dialect.name not in self._off

    def switch(self, name: str, on: bool) -> None:
        """Answer a dialect or not, from the next request on; raises InvalidRequest where there is none of that name."""
        if name not in self._dialects:
            known = ", ".join(self._dialects)
            raise InvalidRequest(f"There is no dialect called {name}; there are: {known}", param="name")
        self._begun = True
        self._off = self._off - {name} if on else self._off | {name}

    def begin_without(self, names: Iterable[str]) -> None:
        """Switch these off where nobody has switched any yet; raises as `switch` does."""
        if not self._begun:
            self._begun = True
            for name in names:
                self.switch(name, False)

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

    def _here(self, request: web.Request) -> Mapping[str, web.RouteDef]:
        """The endpoints at the request's place, by dialect, in the order of the table."""
        resource = request.match_info.route.resource
        method = "GET" if request.method == "HEAD" else request.method
        return {} if resource is None else self._at.get((method, resource.canonical), {})

    def _asked(self, request: web.Request) -> list[Dialect]:
        """The dialects that have an endpoint there, as far as headers tell them apart."""
        here = [self._dialects[name] for name in self._here(request)]
        if len(here) < 2:
            return here
        signed = [dialect for dialect in here if dialect.is_asked_by(request)]
        return signed or [dialect for dialect in here if not dialect.header]

    def _first_on(self, dialects: Sequence[Dialect]) -> Dialect:
        """The first that is answered, else the first."""
        return next(filter(self.is_on, dialects), dialects[0])


def _shared(here: Mapping[str, web.RouteDef]) -> Handler:
    """What lets the dialect that a request was found to be in answer it."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        handler = cast(Handler, here[call_of(request).dialect].handler)
        return await handler(request)

    return attach_specs(pass_on, *(described for route in here.values() for described in endpoint_specs(route.handler)))


def _plain(route: web.RouteDef) -> str:
    """The path as aiohttp's resources name it."""
    return _PATTERN.sub(r"{\1}", route.path)
