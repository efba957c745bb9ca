"""Descriptions of endpoints and JSON schemas of bodies, of which /openapi.json is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from console.api.requests.parameters import Refusal
from engine.config import MAX_BANNED_CHARACTERS, MAX_BANNED_STRINGS, MAX_STOP_STRINGS, TINY

# Bodies and answers of an endpoint, declared at its handler.
#
# @describes("Continue a text", body=CompletionBody, answer=Completion, event=Completion)
# async def _post(self, request: web.Request) -> web.StreamResponse: ...

_ATTRIBUTE = "__described__"

H = TypeVar("H", bound=Callable[..., Any])


Operation = Literal["chat", "text_completion", "embeddings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """One kind of request to an endpoint.

    success: the status of an answer that is no error; None where every answer is one.
    body: the schema that reads it; None where there is none.  optional: whether it may be left out.
    answer: a type that msgspec knows, a media type as text where the answer is no JSON, None where nothing is known of
    it.  event: what each chunk of a stream holds; media: the stream's content type.
    query: parameters in the address, and what each means.  example: a body that is answered.
    group: its heading where it belongs to no dialect.
    operation: what a model is asked for, as OpenTelemetry's conventions for generative AI name it.
    """

    summary: str
    success: int | None = 200
    body: type[BaseModel] | None = None
    optional: bool = False
    answer: Any = None
    event: Any = None
    media: str = "text/event-stream"
    query: Mapping[str, str] = field(default_factory=dict)
    example: Mapping[str, object] | None = None
    group: str = ""
    operation: Operation = "text_completion"


def describes(summary: str, **fields: Any) -> Callable[[H], H]:
    """Declare a handler's body and answers. fields: those of EndpointSpec."""

    def mark(handler: H) -> H:
        return attach_specs(handler, EndpointSpec(summary=summary, **fields))

    return mark


def attach_specs(handler: H, *described: EndpointSpec) -> H:
    """Declare several kinds of requests to one handler."""
    setattr(handler, _ATTRIBUTE, described)
    return handler


def endpoint_specs(handler: object) -> tuple[EndpointSpec, ...]:
    """Return what a handler declares: one entry for each kind of request."""
    found: tuple[EndpointSpec, ...] = getattr(handler, _ATTRIBUTE, ())
    return found


JsonSchema = dict[str, Any]

_ENTRY = re.compile(r"(?:^|\n|  )\s*([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*): ")
"""Start of a field's meaning in a docstring."""

TEXTS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
"""One text, or several."""

_STOP_STRINGS: JsonSchema = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS}
STOP_STRINGS = WithJsonSchema(_STOP_STRINGS)
STOPS = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _STOP_STRINGS]})
"""Texts that end an answer."""

BANNED_STRINGS = WithJsonSchema(
    {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_BANNED_CHARACTERS},
        "maxItems": MAX_BANNED_STRINGS,
    }
)
"""Texts that answers never contain."""

BIASES = WithJsonSchema(
    {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
)
"""By token id."""

SAMPLERS = WithJsonSchema(
    {"anyOf": [{"type": "array", "items": {"type": ["string", "integer"]}}, {"type": "string"}, {"type": "null"}]}
)
"""An order of samplers."""

ANSWER_TOKENS = WithJsonSchema({"type": "integer", "minimum": 1})
"""Max tokens of an answer."""

ANY_TEXT: JsonSchema = {"type": "string"}
SOME_TEXT: JsonSchema = {"type": "string", "minLength": 1}
TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}

_TOKEN_ID: JsonSchema = {"type": "integer", "minimum": 0}
TOKEN_IDS = WithJsonSchema({"type": "array", "items": _TOKEN_ID})
"""Token ids; their upper bound depends on the model."""


def _prompts(text: JsonSchema) -> WithJsonSchema:
    one: JsonSchema = {"anyOf": [text, {"type": "array", "items": _TOKEN_ID, "minItems": 1}]}
    return WithJsonSchema({"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}]})


PROMPTS = _prompts(ANY_TEXT)
"""One prompt as text or token ids, or several."""

TEXTS_TO_EMBED = _prompts(SOME_TEXT)
"""One text or several, or token ids, none empty."""


def message_schema(*roles: str, required: Collection[str] = ("content",), **fields: JsonSchema) -> JsonSchema:
    """Return the schema of a message of one of these roles. null is the same as leaving a field out."""
    return {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, **fields},
        "required": ["role", *required],
        "additionalProperties": {"type": "null"},
    }


def conversation_schema(*turns: JsonSchema, least: int = 1) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": {"anyOf": list(turns)}, "minItems": least})


def text_or_parts(*parts: JsonSchema, least: int = 0) -> JsonSchema:
    return {"anyOf": [ANY_TEXT, {"type": "array", "items": {"anyOf": list(parts)}, "minItems": least}]}


_PART: JsonSchema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": ANY_TEXT},
    "required": ["type", "text"],
}
_CONTENT = text_or_parts(_PART)
_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": SOME_TEXT,
        "type": {"enum": ["function", None]},
        "index": {},
        "function": {
            "type": "object",
            "properties": {"name": SOME_TEXT, "arguments": {**TEXT_OR_NULL, "contentMediaType": "application/json"}},
            "required": ["name"],
            "additionalProperties": {"type": "null"},
        },
    },
    "required": ["id", "function"],
    "additionalProperties": {"type": "null"},
}
MESSAGES = conversation_schema(
    message_schema("system", "developer", "user", content=_CONTENT, name=TEXT_OR_NULL),
    message_schema(
        "assistant",
        required=(),
        content={"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
        name=TEXT_OR_NULL,
        tool_calls={"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
    ),
    message_schema(
        "tool", required=("content", "tool_call_id"), content=_CONTENT, tool_call_id=SOME_TEXT, name=TEXT_OR_NULL
    ),
)
"""A conversation as OpenAI has it."""


def closed_object(*required: str, **fields: JsonSchema) -> JsonSchema:
    """Return the schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def one_given(*names: str) -> JsonSchema:
    """Return the rule that one of these fields is there, and not null."""
    return {"anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]}


_NAMED_FUNCTION = closed_object(
    "type", "function", type={"const": "function"}, function=closed_object("name", name=ANY_TEXT)
)
_ALLOWED_TOOLS = closed_object(
    "mode", "tools", mode={"enum": ["auto", "required"]}, tools={"type": "array", "items": _NAMED_FUNCTION}
)
TOOL_CHOICE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _NAMED_FUNCTION,
            closed_object("type", "allowed_tools", type={"const": "allowed_tools"}, allowed_tools=_ALLOWED_TOOLS),
        ]
    }
)
"""The tools that an answer may call, or has to."""


def complete_schema(
    schema: JsonSchema,
    docs: Iterable[str],
    refused: Mapping[str, Refusal],
    inert: Collection[str],
    aliases: Mapping[str, str],
    clamped: Mapping[str, str],
    internal: Collection[str],
    rules: Sequence[JsonSchema],
    ranges: Mapping[str, tuple[float, float]],
    limits: Mapping[str, int],
) -> JsonSchema:
    """Return the schema of a body whose fields are those of `schema`. null is the same as leaving a field out.

    docs: docstrings with the meanings of fields, the nearest first.  rules: further constraints.
    ranges: lowest and highest values of fields without their own.  limits: max length of arrays and objects.
    """
    docs = list(docs)
    fields, required = schema.get("properties", {}), schema.get("required", [])
    public = {name: field for name, field in fields.items() if name not in internal}
    untitled = {name: {key: field[key] for key in field if key != "title"} for name, field in public.items()}
    untitled |= {name: _with_bounds(untitled[name], *bounds) for name, bounds in ranges.items() if name in untitled}
    untitled |= {name: _with_max_entries(untitled[name], limit) for name, limit in limits.items() if name in untitled}
    properties = {name: field if name in required else _nullable(field) for name, field in untitled.items()}
    for name, meaning in meanings(docs).items():
        if name in properties:
            properties[name] = {**properties[name], "description": meaning}
    for name, how in clamped.items():
        meaning = properties[name].get("description", "")
        properties[name] = {**properties[name], "description": f"{meaning} Clamped: {how}.".strip()}
    for alias, name in sorted(aliases.items()):
        if name in properties:
            properties[alias] = {**properties[name], "description": f"Alias of {name}"}
    for name, refusal in sorted(refused.items()):
        properties.setdefault(name, _refused_field(refusal))
    for name in sorted(inert):
        properties.setdefault(name, {"description": "Accepted; no effect on the answer"})
    whole = {**schema, "description": docs[0].partition("\n\n")[0], "properties": properties}
    return {**whole, "allOf": list(rules)} if rules else whole


def meanings(docs: Iterable[str]) -> dict[str, str]:
    """Return the meanings of fields in docstrings: `name: meaning` or `name, other: meaning`, on a line of its own or
    after two spaces."""
    found: dict[str, str] = {}
    for doc in docs:
        entries = list(_ENTRY.finditer(doc))
        for entry, after in zip_longest(entries, entries[1:]):
            text = doc[entry.end() : after.start() if after else None].partition("\n\n")[0]
            for name in entry[1].split(", "):
                found.setdefault(name, " ".join(text.split()))
    return found


@dataclass(frozen=True, slots=True)
class ShapedAs:
    """Annotates a field that holds another body, read on its own: `Annotated[dict[str, Any], ShapedAs(Options)]`."""

    body: type[BaseModel]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.body.__get_pydantic_json_schema__(self.body.__pydantic_core_schema__, handler)


def _with_bounds(field: JsonSchema, low: float, high: float) -> JsonSchema:
    if "anyOf" in field:
        return {**field, "anyOf": [_with_bounds(kind, low, high) for kind in field["anyOf"]]}
    if field.get("type") not in ("integer", "number"):
        return field
    least = {"exclusiveMinimum": 0} if low == TINY else {"minimum": low}
    own = {} if "minimum" in field else least
    return {"maximum": high, **own, **field}


def _with_max_entries(field: JsonSchema, limit: int) -> JsonSchema:
    """Return the field's schema with max `limit` entries in arrays and objects."""
    if "anyOf" in field:
        return {**field, "anyOf": [_with_max_entries(kind, limit) for kind in field["anyOf"]]}
    most = {"array": "maxItems", "object": "maxProperties"}.get(field.get("type", ""))
    return field if most is None else {most: limit, **field}


def _nullable(field: JsonSchema) -> JsonSchema:
    kinds = field.get("anyOf", [field])
    if field.get("type") == "null" or any(kind.get("type") == "null" for kind in kinds):
        return field
    if "anyOf" in field:
        return {**field, "anyOf": [*kinds, {"type": "null"}]}
    outside: JsonSchema = {name: field[name] for name in ("default", "description") if name in field}
    inside = {name: value for name, value in field.items() if name not in outside}
    return {**outside, "anyOf": [inside, {"type": "null"}]} if inside else field


def _refused_field(refusal: Refusal) -> JsonSchema:
    return {"enum": refusal.passing, "description": f"Not supported: {refusal.reason}", "x-refused": True}
