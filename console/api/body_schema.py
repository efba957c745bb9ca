"""What a request body's JSON schema says besides its fields: other names, what is refused, what changes nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from console.api.parameters import Refusal

JsonSchema = dict[str, Any]

_ENTRY = re.compile(r"(?:^|\n|  )\s*([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*): ")
"""Where a docstring begins to tell what a field means."""

TEXTS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
"""One text, or several."""

ANSWER_TOKENS = WithJsonSchema({"type": "integer", "minimum": 1})
"""How many tokens an answer may have."""

_TOKENS: JsonSchema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT: JsonSchema = {"anyOf": [{"type": "string"}, _TOKENS]}
PROMPTS = WithJsonSchema({"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]})
"""One prompt as text or token ids, or several."""

MESSAGES = WithJsonSchema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "role": {"type": "string"},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
                },
            },
            "required": ["role"],
        },
        "minItems": 1,
    }
)
"""A conversation."""


def completed(
    schema: JsonSchema,
    docs: Iterable[str],
    refused: Mapping[str, Refusal],
    inert: Collection[str],
    aliases: Mapping[str, str],
    clamped: Mapping[str, str],
    internal: Collection[str],
) -> JsonSchema:
    """The schema of a body whose fields are those of `schema`. null is the same as leaving a field out.

    docs: the docstrings that say what the fields mean, the nearest first.
    """
    docs = list(docs)
    fields, required = schema.get("properties", {}), schema.get("required", [])
    known = {name: field for name, field in fields.items() if name not in internal}
    untitled = {name: {key: field[key] for key in field if key != "title"} for name, field in known.items()}
    properties = {name: field if name in required else _or_null(field) for name, field in untitled.items()}
    for name, meaning in meanings(docs).items():
        if name in properties:
            properties[name] = {**properties[name], "description": meaning}
    for name, how in clamped.items():
        meaning = properties[name].get("description", "")
        properties[name] = {**properties[name], "description": f"{meaning} Clamped: {how}.".strip()}
    for alias, name in sorted(aliases.items()):
        if name in properties:
            properties[alias] = {**properties[name], "description": f"The same as {name}"}
    for name, refusal in sorted(refused.items()):
        properties.setdefault(name, _refused(refusal))
    for name in sorted(inert):
        properties.setdefault(name, {"description": "Taken; it changes nothing about an answer"})
    return {**schema, "description": docs[0].partition("\n\n")[0], "properties": properties}


def meanings(docs: Iterable[str]) -> dict[str, str]:
    """What docstrings say of each field: `name: meaning` or `name, other: meaning`, on a line of its own or after two
    spaces."""
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
        return handler(self.body.__pydantic_core_schema__)


def _or_null(field: JsonSchema) -> JsonSchema:
    kinds = field.get("anyOf", [field])
    if field.get("type") == "null" or any(kind.get("type") == "null" for kind in kinds):
        return field
    if "anyOf" in field:
        return {**field, "anyOf": [*kinds, {"type": "null"}]}
    outside: JsonSchema = {name: field[name] for name in ("default", "description") if name in field}
    inside = {name: value for name, value in field.items() if name not in outside}
    return {**outside, "anyOf": [inside, {"type": "null"}]} if inside else field


def _refused(refusal: Refusal) -> JsonSchema:
    return {"enum": [*refusal.neutral, None], "description": f"Not supported: {refusal.reason}", "x-refused": True}
