"""Fields that constrain the format of an answer: OpenAI's, and those of vLLM's and TabbyAPI's clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from console.api.requests.body import Body
from console.api.requests.structured_output import (
    MAX_SCHEMA_BYTES,
    choice_grammar,
    json_grammar,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
)
from engine.config import Grammar
from engine.errors import InvalidRequest

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
            yield _json("response_format.json_schema.schema", self.json_schema.json_schema, max_bytes, lenient=lenient)


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
    Empty ones are ignored, as SillyTavern sends them, except guided_regex.
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
        schema = None if self.guided_json == {} else self.guided_json
        guided = schema, self.guided_regex, self.guided_choice or None, self.guided_grammar or None
        yield from _formats("guided_", *guided, max_bytes)
        if self.structured_outputs is not None:
            yield from self.structured_outputs.requested_formats(max_bytes)
        if self.json_schema not in (None, {}):
            yield _json("json_schema", self.json_schema, max_bytes)
        if self.regex_pattern:
            yield "regex_pattern", partial(regex_grammar, self.regex_pattern, "regex_pattern", max_bytes=max_bytes)
        if self.grammar_string:
            yield "grammar_string", partial(lark_grammar, self.grammar_string, "grammar_string", max_bytes=max_bytes)


def _formats(
    prefix: str, schema: object, regex: str | None, choice: list[str] | None, grammar: str | None, max_bytes: int
) -> Iterator[RequestedFormat]:
    """Yield the formats that are set, each under its name after the prefix."""
    if schema is not None:
        yield _json(f"{prefix}json", schema, max_bytes)
    if regex is not None:
        yield f"{prefix}regex", partial(regex_grammar, regex, f"{prefix}regex", max_bytes=max_bytes)
    if choice is not None:
        yield f"{prefix}choice", partial(choice_grammar, choice, f"{prefix}choice", max_bytes=max_bytes)
    if grammar is not None:
        yield f"{prefix}grammar", partial(lark_grammar, grammar, f"{prefix}grammar", max_bytes=max_bytes)


def _json(param: str, schema: object, max_bytes: int, *, lenient: bool = False) -> RequestedFormat:
    return param, partial(json_grammar, schema, param, lenient=lenient, max_bytes=max_bytes)
