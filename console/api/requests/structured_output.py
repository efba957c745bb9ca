"""Structured output: the fields that constrain the format of an answer (OpenAI's, and those of vLLM's and TabbyAPI's
clients), and the engine's Grammar from what they hold.

What makes a grammar here refuses what nothing can be held to, naming the client's field. That is a fraction of a
second's work at worst, and nothing for a grammar that was seen lately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import from_json

from console.api.requests.body import Body
from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text import grammar as grammars

MAX_SCHEMA_BYTES = 65_536
"""Longest schema, regular expression or grammar, where no setting says otherwise."""

MAX_CHOICES = 1000
_CHECKED_KEPT = 256
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_grammar(schema: object, param: str, *, lenient: bool = False, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """One JSON value that a JSON schema describes, itself an object or JSON text (`true` is any value).

    lenient: keywords that answers cannot be held to are left aside, where they are refused otherwise.
    Raises InvalidRequest naming `param`.
    """
    if isinstance(schema, str):
        Grammar(kind="json_schema", source=schema, param=param).refuse_longer(max_bytes)
        try:
            schema = from_json(schema, allow_inf_nan=False)
        except ValueError:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} should be a JSON schema that something satisfies: an object", param=param)
    if "x-guidance" in schema:
        raise InvalidRequest(f"{param}.x-guidance is no keyword that clients can set", param=param)
    schema = schema | {"x-guidance": {"lenient": True}} if lenient else schema
    return _checked(Grammar(kind="json_schema", source=_json(schema, param, max_bytes), param=param), max_bytes)


def json_object_grammar(param: str = "response_format") -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", param=param)


def regex_grammar(text: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """A text that a regular expression matches from its start to its end. Raises InvalidRequest naming `param`."""
    return _checked(Grammar(kind="regex", source=_text(text, param), param=param), max_bytes)


def choice_grammar(choices: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """One of several strings. Raises InvalidRequest naming `param`."""
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(each, str) for each in choices):
        raise InvalidRequest(f"{param} should be an array of strings", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{param} has {len(choices)} strings; the max is {MAX_CHOICES}", param=param)
    source = _json(choices, param, max_bytes)
    return _checked(Grammar(kind="choice", source=source, param=param), max_bytes)


def lark_grammar(text: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """A text that a context-free grammar describes, written as Lark has it or as GBNF (`root ::= ...`).

    Raises InvalidRequest naming `param`.
    """
    return _checked(Grammar(kind="lark", source=_text(text, param), param=param), max_bytes)


def _json(value: object, param: str, max_bytes: int) -> str:
    """Return the value as JSON. Raises InvalidRequest as soon as that is too long, or where it is nested too deeply."""
    pieces: list[str] = []
    room = max_bytes
    try:
        for piece in _ENCODER.iterencode(value):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise InvalidRequest(f"{param} has more than {max_bytes:,} bytes", param=param, limit=max_bytes)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
    return "".join(pieces)


def _checked(grammar: Grammar, max_bytes: int) -> Grammar:
    grammar.refuse_longer(max_bytes)
    _check(grammar)
    return grammar


@lru_cache(_CHECKED_KEPT)
def _check(grammar: Grammar) -> None:
    """Check a grammar once for all requests that use it; one that is refused is checked each time."""
    grammars.check(grammar)


def _text(text: object, param: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{param} should be a string, not an empty one", param=param)
    return text


# Fields of clients.

RequestedFormat = tuple[str, Callable[[], Grammar]]
"""A field that asks for a format, by the client's name, and the function that makes its grammar."""

_ANY_OBJECT = "structured_outputs.json_object"
_SCHEMA = WithJsonSchema({"anyOf": [{"type": "object"}, {"const": True}, {"type": "string"}, {"type": "null"}]})
_REGEX = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]})


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class JsonSchemaFormat(_Part):
    """A JSON schema with a name. strict: False ignores keywords that grammars cannot express."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's: any text, any JSON object, or JSON that a schema describes."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object"]}}},
                {
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "properties": {"schema": {"type": ["object", "boolean"]}},
                            "required": ["schema"],
                        },
                    },
                    "required": ["json_schema"],
                },
            ]
        },
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        """Yield the format that it asks for, if any. Raises InvalidRequest where the schema is missing."""
        if self.type == "json_object":
            yield "response_format", json_object_grammar
        elif self.type == "json_schema":
            if self.json_schema is None or self.json_schema.json_schema is None:
                raise InvalidRequest(
                    "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
                )
            lenient = self.json_schema.strict is False
            yield _json_format(
                "response_format.json_schema.schema", self.json_schema.json_schema, max_bytes, lenient=lenient
            )


class StructuredOutputs(_Part):
    """vLLM's: one of these. disable_fallback: there is none; disable_any_whitespace: there is always some."""

    json_schema: Annotated[object, _SCHEMA, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None

    def requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        """Yield the format that it asks for; raises InvalidRequest where there is none."""
        found = [*_formats("structured_outputs.", self.json_schema, self.regex, self.choice, self.grammar, max_bytes)]
        if self.json_object:
            found.append((_ANY_OBJECT, partial(json_object_grammar, _ANY_OBJECT)))
        if not found:
            raise InvalidRequest(
                "structured_outputs should have one of json, regex, choice, grammar and json_object",
                param="structured_outputs",
            )
        yield from found


class FormatFields(Body):
    """Fields for the format of the answer, only one of which may be set.

    guided_json, guided_regex, guided_choice, guided_grammar, structured_outputs: format as in vLLM.
    json_schema, regex_pattern, grammar_string: format as in TabbyAPI; grammar_string also in text-generation-webui.
    Empty ones are ignored, as SillyTavern sends them.
    """

    response_format: ResponseFormat | None = None
    guided_json: Annotated[object, _SCHEMA] = None
    guided_regex: Annotated[str | None, _REGEX] = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Annotated[object, _SCHEMA] = None
    regex_pattern: str | None = None
    grammar_string: str | None = None

    def format(self, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar | None:
        """Return the grammar of the answer, None for any text; takes a fraction of a second at worst.

        max_bytes: of a schema, a regular expression or a grammar. Raises InvalidRequest naming the field.
        """
        named = list(self._requested_formats(max_bytes))
        if len(named) > 1:
            (first, _), (second, _), *_ = named
            raise InvalidRequest(f"{second} and {first} both set a format; send one of them", param=second)
        return named[0][1]() if named else None

    @property
    def asks_for_format(self) -> bool:
        """True if the answer has a format."""
        return any(getattr(self, name) is not None for name in FormatFields.model_fields)

    def _requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        if self.response_format is not None:
            yield from self.response_format.requested_formats(max_bytes)
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        yield from _formats("guided_", *guided, max_bytes)
        if self.structured_outputs is not None:
            yield from self.structured_outputs.requested_formats(max_bytes)
        if self.json_schema is not None:
            yield _json_format("json_schema", self.json_schema, max_bytes)
        if self.regex_pattern:
            yield "regex_pattern", partial(regex_grammar, self.regex_pattern, "regex_pattern", max_bytes=max_bytes)
        if self.grammar_string:
            name = self.sent_name("grammar_string")
            yield name, partial(lark_grammar, self.grammar_string, name, max_bytes=max_bytes)


def _formats(
    prefix: str, schema: object, regex: str | None, choice: list[str] | None, grammar: str | None, max_bytes: int
) -> Iterator[RequestedFormat]:
    """Yield the formats that are set, each under its name after the prefix."""
    if schema is not None:
        yield _json_format(f"{prefix}json", schema, max_bytes)
    if regex is not None:
        yield f"{prefix}regex", partial(regex_grammar, regex, f"{prefix}regex", max_bytes=max_bytes)
    if choice is not None:
        yield f"{prefix}choice", partial(choice_grammar, choice, f"{prefix}choice", max_bytes=max_bytes)
    if grammar is not None:
        yield f"{prefix}grammar", partial(lark_grammar, grammar, f"{prefix}grammar", max_bytes=max_bytes)


def _json_format(param: str, schema: object, max_bytes: int, *, lenient: bool = False) -> RequestedFormat:
    return param, partial(json_grammar, schema, param, lenient=lenient, max_bytes=max_bytes)
