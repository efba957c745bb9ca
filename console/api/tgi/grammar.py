"""TGI's grammars: what an answer is held to, as its clients send it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from console.api.structured import json_grammar, regex_grammar
from engine.config import Grammar
from engine.errors import InvalidRequest


class TgiGrammar(BaseModel):
    """What the answer must be. value: a JSON schema, {"schema": ...} for json_schema, or a regular expression."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"const": "regex"}, "value": {"type": "string", "minLength": 1}}},
                {"properties": {"type": {"enum": ["json", "json_object"]}, "value": {"type": ["object", "string"]}}},
                {
                    "properties": {
                        "type": {"const": "json_schema"},
                        "value": {"type": "object", "required": ["schema"]},
                    }
                },
            ]
        },
    )

    type: str
    value: Any

    def grammar(self, max_bytes: int) -> Grammar:
        """The same for the engine; a fraction of a second's work at worst. Raises InvalidRequest."""
        match self.type, self.value:
            case "regex", str(text):
                return regex_grammar(text, "grammar", max_bytes=max_bytes)
            case "json" | "json_object", schema:
                return json_grammar(schema, "grammar", max_bytes=max_bytes)
            case "json_schema", {"schema": schema}:
                return json_grammar(schema, "grammar", max_bytes=max_bytes)
            case "regex" | "json_schema", _:
                value = "a string" if self.type == "regex" else 'an object with "schema"'
                raise InvalidRequest(f"grammar of type {self.type} should have {value} as its value", param="grammar")
            case _:
                raise InvalidRequest("grammar should be of type json, json_schema or regex", param="grammar")
