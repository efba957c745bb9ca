"""GET /openapi.json: all endpoints, made of their declarations (`requests/schemas.py`), of the schemas that read
bodies, and of the types of answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, get_type_hints

import msgspec
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from console.api.dialects.registry import DialectRegistry
from console.api.http.errors import ErrorFormatter, envelope
from console.api.http.scopes import is_open, scope_needed
from console.api.requests.schemas import EndpointSpec, JsonSchema, describes, endpoint_specs
from console.api.requests.stream import SSE
from console.api.version import product_version

_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)\}")
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""A server-sent event."""

_ABOUT = """\
One engine behind several API dialects. Dialects that are switched off are not listed.

Unsupported values return 400 and name the parameter. A parameter marked x-refused accepts only the values of its enum,
which have no effect. Aliases of a field may be sent together if their values are equal. Some checks depend on the
model: context length, vocabulary, chat template. Streams are server-sent events unless stated otherwise; x-event is
the schema of an event.

A stream that waits in the queue has the headers X-Queue-Position (1 is next) and, where it can be foreseen,
X-Expected-Wait-Seconds; until the first token, comments between its events say how far it is. An answer that is no
stream has X-Queue-Wait-Seconds, the time that it waited.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """One method at one path. groups: its headings.  error_formatters: of the dialects there."""

    method: str
    path: str
    described: Sequence[EndpointSpec]
    groups: Sequence[str]
    error_formatters: Sequence[ErrorFormatter]

    @property
    def name(self) -> str:
        """Name of the operation in generated clients."""
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.path)])


class OpenApi:
    """GET /openapi.json."""

    def __init__(self, dialects: DialectRegistry) -> None:
        self._dialects = dialects
        self._made: dict[tuple[str, ...], bytes] = {}
        self._making = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.get("/openapi.json", self._get)]

    @describes("API description (OpenAPI)", answer=dict[str, Any], group="pages")
    async def _get(self, request: web.Request) -> web.Response:
        places = tuple(places_of(request.app, self._dialects))
        key = tuple(f"{place.method} {place.path} {' '.join(place.groups)}" for place in places)
        async with self._making:  # takes a while, and needs no key
            if key not in self._made:
                titles = [reading.title for reading in self._dialects.readings({})]
                self._made[key] = await asyncio.to_thread(_encode, places, titles)
        return web.Response(body=self._made[key], content_type="application/json")


def places_of(app: web.Application, dialects: DialectRegistry) -> Iterator[Place]:
    """Yield all endpoints that are on, by path."""
    for route in sorted(app.router.routes(), key=lambda route: route.resource.canonical if route.resource else ""):
        if route.resource is None or route.method == "HEAD":
            continue
        path, here = route.resource.canonical, dialects.at(route.method, route.resource.canonical)
        on = [dialect for dialect in here if dialects.is_on(dialect)]
        if here and not on:
            continue
        described = endpoint_specs(route.handler)
        groups = [dialect.title for dialect in on] or list(dict.fromkeys(each.group or "server" for each in described))
        yield Place(route.method, path, described, groups, [dialect.format_error for dialect in on] or [envelope])


def document(places: Sequence[Place], version: str, titles: Sequence[str] = ()) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of those places. titles: headings that come before others."""
    schemas = _Schemas(places)
    groups = dict.fromkeys(group for place in places for group in place.groups)
    paths: dict[str, dict[str, Any]] = {}
    for place in places:
        paths.setdefault(place.path, {})[place.method.lower()] = _operation(place, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "EricLLM Console", "version": version, "description": _ABOUT},
        "servers": [{"url": "./"}],  # next to this document, also behind a proxy
        "security": [{}, {"bearer": []}, {"key": []}],
        "tags": [{"name": group} for group in dict.fromkeys([*titles, *groups]) if group in groups],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _encode(places: Sequence[Place], titles: Sequence[str]) -> bytes:
    return msgspec.json.encode(document(places, product_version(), titles))


def _operation(place: Place, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": place.name,
        "tags": list(place.groups),
        "summary": " / ".join(dict.fromkeys(each.summary for each in place.described)) or place.name,
        "responses": {
            **_successes(place.described, schemas),
            "default": {
                "description": "Error, in the format of this API",
                "content": {"application/json": {"schema": _any_of(map(schemas.error, place.error_formatters))}},
            },
        },
    }
    if is_open(place.path):
        operation["security"] = []
    elif (scope := scope_needed(place.method, place.path)) is not None:
        operation["x-scope"] = scope
    if parameters := list(_parameters(place)):
        operation["parameters"] = parameters
    if bodies := [each for each in place.described if each.body is not None]:
        operation["requestBody"] = _request_body(bodies, schemas)
    return operation


def _successes(described: Sequence[EndpointSpec], schemas: _Schemas) -> dict[str, Any]:
    """Return the successful answers, by status."""
    found: dict[int, list[EndpointSpec]] = {}
    for each in described or (EndpointSpec(summary=""),):
        if each.success is not None:
            found.setdefault(each.success, []).append(each)
    return {
        str(status): {"description": HTTPStatus(status).phrase, **_content(_answers(each, schemas))}
        for status, each in found.items()
    }


def _parameters(place: Place) -> Iterator[dict[str, Any]]:
    text = {"schema": {"type": "string"}}
    for name in _PARAMETER.findall(place.path):
        yield {"name": name, "in": "path", "required": True, **text}
    for name, meaning in {name: text for each in place.described for name, text in each.query.items()}.items():
        yield {"name": name, "in": "query", "description": meaning, **text}


def _request_body(bodies: Sequence[EndpointSpec], schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": _any_of(schemas.body(each) for each in bodies)}
    examples = [each.example for each in bodies if each.example is not None]
    if len(examples) == 1:
        content["example"] = examples[0]
    elif examples:
        content["examples"] = {f"example {at}": {"value": value} for at, value in enumerate(examples, 1)}
    return {"required": not all(each.optional for each in bodies), "content": {"application/json": content}}


def _answers(described: Sequence[EndpointSpec], schemas: _Schemas) -> dict[str, Any]:
    """Return the schemas of answers and events, by media type."""
    found: dict[str, list[JsonSchema]] = {}
    streams: dict[str, list[JsonSchema]] = {}
    for each in described:
        if isinstance(each.answer, str):
            found.setdefault(each.answer, []).append({"type": "string"})
        elif each.answer is not None:
            found.setdefault("application/json", []).append(schemas.answer(each.answer))
        if each.event is not None:
            streams.setdefault(each.media, []).append(schemas.answer(each.event))
    answers: dict[str, Any] = {media: {"schema": _any_of(kinds)} for media, kinds in found.items()}
    for media, kinds in streams.items():
        answers[media] = {
            "schema": _EVENT if media == SSE.content_type else {"type": "string"},
            "x-event": _any_of(kinds),
        }
    return answers


def _content(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": answers} if answers else {}


def _any_of(schemas: Iterable[JsonSchema]) -> JsonSchema:
    """Return a schema for any of them, each once."""
    kinds: list[JsonSchema] = []
    for schema in schemas:
        if schema not in kinds:
            kinds.append(schema)
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


class _Schemas:
    """The schemas of some places, and their places in `components`."""

    def __init__(self, places: Sequence[Place]) -> None:
        described = [each for place in places for each in place.described]
        bodies = list(dict.fromkeys(each.body for each in described if each.body is not None))
        shapes = [shape for each in described for shape in (each.answer, each.event) if _is_shape(shape)]
        shapes += [_error_type(formatter) for place in places for formatter in place.error_formatters]
        self._bodies, body_schemas = _body_schemas(bodies)
        unique = {repr(shape): shape for shape in shapes}
        found, answer_schemas = msgspec.json.schema_components(
            unique.values(), schema_hook=_unknown, ref_template=f"{_SCHEMAS}{{name}}"
        )
        names = _names(body_schemas, answer_schemas)
        self._bodies = _rename(self._bodies, names[0])
        self._answers = dict(zip(unique, _rename(list(found), names[1]), strict=True))
        self.components = {
            renames[name]: _rename(each, renames)
            for components, renames in zip((body_schemas, answer_schemas), names, strict=True)
            for name, each in components.items()
        }

    def body(self, described: EndpointSpec) -> JsonSchema:
        """Return the schema of a body."""
        assert described.body is not None
        return self._bodies[described.body]

    def answer(self, shape: Any) -> JsonSchema:
        """Return the schema of an answer or an event."""
        schema: JsonSchema = self._answers[repr(shape)]
        return schema

    def error(self, formatter: ErrorFormatter) -> JsonSchema:
        """Return the schema of a dialect's error."""
        return self.answer(_error_type(formatter))


def _body_schemas(bodies: Sequence[type[BaseModel]]) -> tuple[dict[type[BaseModel], JsonSchema], dict[str, JsonSchema]]:
    """Return a reference to each body's schema, and all schemas."""
    places, found = models_json_schema([(body, "validation") for body in bodies], ref_template=f"{_SCHEMAS}{{model}}")
    return {body: places[body, "validation"] for body in bodies}, found.get("$defs", {})


def _is_shape(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, str)


def _unknown(kind: type) -> JsonSchema:
    """Return the schema of a type that msgspec has none for: of any value, or of text, as paths are written."""
    return {"description": "Any value"} if kind is object else {"type": "string"}


def _error_type(formatter: ErrorFormatter) -> Any:
    """Return the type of a dialect's errors."""
    return get_type_hints(formatter).get("return", object)


def _names(of_bodies: Iterable[str], of_answers: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the component names of bodies and of answers: two of one name in Python get their modules' before it,
    which pydantic and msgspec write differently."""
    bodies = {name: name.replace("__", ".").removeprefix("console.api.") for name in of_bodies}
    answers = {name: name.removeprefix("console.api.") for name in of_answers}
    used = set(bodies.values())
    return bodies, {name: f"{short}Answer" if short in used else short for name, short in answers.items()}


def _rename(schema: Any, names: Mapping[str, str]) -> Any:
    """Return the schema with its components renamed."""
    match schema:
        case list():
            return [_rename(each, names) for each in schema]
        case {"$ref": str(reference)}:
            return {**schema, "$ref": _SCHEMAS + names[reference.removeprefix(_SCHEMAS)]}
        case dict():
            return {key: _rename(value, names) for key, value in schema.items()}
        case _:
            return schema
