"""The fields of a request body as lines of a table: what each takes, what it is when it is left out, what it means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic.fields import FieldInfo

from console.api.body import Body
from console.api.body_schema import JsonSchema, ShapedAs
from console.api.parameters import Refusal
from engine.backends.parameters import bounds

_ENGINE_S = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_length": "max_tokens"}
"""What the engine calls fields whose bounds it sets; others have one name."""

_NUMBERS = ("integer", "number")


@dataclass(frozen=True, slots=True)
class Row:
    """One field. also: its other names.  takes: the values that it may have.  default: where it is left out."""

    name: str
    also: tuple[str, ...]
    takes: str
    default: str
    meaning: str

    @property
    def line(self) -> str:
        """As Markdown has it."""
        also = ", ".join(f"`{name}`" for name in self.also)
        return f"| `{self.name}` | {also} | {self.takes} | {self.default} | {_cell(self.meaning)} |"


HEAD = "| field | also | takes | left out | |\n|---|---|---|---|---|"
REFUSED_HEAD = "| field | passes | why any other value is refused |\n|---|---|---|"


def rows_of(body: type[Body]) -> dict[str, Row]:
    """Those that a body honours, by name."""
    properties = body.model_json_schema()["properties"]
    return {
        name: Row(
            name,
            tuple(sorted(alias for alias, field in body.aliases.items() if field == name)),
            _takes(properties[name], _ENGINE_S.get(name, name)),
            _default(field),
            " ".join(properties[name].get("description", "").partition("\n\n")[0].split()),
        )
        for name, field in body.model_fields.items()
        if name not in body.internal
    }


def refused_of(body: type[Body]) -> dict[str, Refusal]:
    """What a body refuses, by name; what stands within a field by a path."""
    own = {name: refusal for name, refusal in body.refused.items() if _honoured(body, name) is None}
    within = {
        f"{path}{name}": refusal for path, found in body.refused_within.items() for name, refusal in found.items()
    }
    return own | within


def inert_of(body: type[Body]) -> list[str]:
    """What changes nothing."""
    return sorted(name for name in body.inert if _honoured(body, name) is None)


def bodies_within(body: type[Body]) -> Iterator[tuple[str, type[Body]]]:
    """The fields that hold a body of their own."""
    for name, field in body.model_fields.items():
        for note in field.metadata:
            if isinstance(note, ShapedAs) and issubclass(note.body, Body):
                yield name, note.body


def refused_lines(refused: dict[str, Refusal]) -> Iterator[str]:
    """As Markdown has them."""
    for name, refusal in sorted(refused.items()):
        neutral = ", ".join(f"`{_json(value)}`" for value in refusal.neutral)
        yield f"| `{name}` | {neutral} | {_cell(refusal.reason)} |"


def _honoured(body: type[Body], name: str) -> str | None:
    """The field that takes a value of that name."""
    field = body.aliases.get(name, name)
    return field if field in body.model_fields else None


def _takes(schema: JsonSchema, name: str) -> str:
    kinds = [kind for several in schema.get("anyOf", [schema]) for kind in _one_type_each(several)]
    return " or ".join(dict.fromkeys(filter(None, (_kind(kind, name) for kind in kinds))))


def _one_type_each(schema: JsonSchema) -> list[JsonSchema]:
    """A schema for each of its types but null."""
    types = schema.get("type", "")
    return [{**schema, "type": kind} for kind in (types if isinstance(types, list) else [types]) if kind != "null"]


def _kind(schema: JsonSchema, name: str) -> str:
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return ", ".join(f"`{_json(value)}`" for value in values)
    kind = "object" if "$ref" in schema else schema.get("type", "")
    if kind == "array":
        items = _takes(schema.get("items", {}), "") or "anything"
        return f"array of ({items})" if " or " in items else f"array of {items}"
    if kind in _NUMBERS:
        return f"{kind}{_within(schema, name)}"
    most = schema.get("maxLength")
    return kind if most is None else f"{kind} of up to {most} characters"


def _within(schema: JsonSchema, name: str) -> str:
    """Its bounds: its own where it has some, else those of the engine's field of that name."""
    least: float | None = schema.get("minimum")
    most: float | None = schema.get("maximum", schema.get("exclusiveMaximum"))
    if "exclusiveMinimum" in schema or (least is None and most is None):
        return f", {limits}" if (limits := bounds(name)) else ""
    if least is None:
        return "" if most is None else f", up to {_bound(most)}"
    return f", {_bound(least)} {'or more' if most is None else f'to {_bound(most)}'}"


def _bound(value: float) -> str:
    if value != int(value):
        return str(value)
    return {2**31: "2^31", 2**63 - 1: "2^63-1", -(2**63): "-2^63"}.get(int(value), str(int(value)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_json(field.get_default(call_default_factory=True))}`"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
