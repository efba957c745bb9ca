"""docs/api/parameters.md: what every endpoint of every dialect honours, clamps, refuses and leaves aside.

It is made of the tables that requests are read and refused by. `python -m tools.docs_pages.parameters` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic.fields import FieldInfo

from console.api.context import ApiContext
from console.api.dialects.base import Dialect
from console.api.dialects.registry import discover
from console.api.requests.body import Body
from console.api.requests.parameters import SAMPLING_REFUSED, Refusal
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import JsonSchema, ShapedAs, endpoint_specs
from console.api.settings import ApiSettings
from engine.config import EngineConfig
from engine.engine import Engine
from tools.docs_pages.sampling import bounds, support_differences

# The fields of a request body as lines of a table: what each takes, what it is when it is left out, what it means.

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
    """Return the refused fields of a body by name; those within a field by their path."""
    own = {name: refusal for name, refusal in body.refused.items() if _honoured(body, name) is None}
    within = {
        f"{path}{name}": refusal for path, found in body.refused_within.items() for name, refusal in found.items()
    }
    return own | within


def inert_of(body: type[Body]) -> list[str]:
    """Return the fields of a body that change nothing."""
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


_INTRO = """# Parameters, dialect by dialect

Generated by `python -m tools.docs_pages.parameters > docs/api/parameters.md`; a test compares the two. A field is

* **supported**: it does what its client expects. A value out of range returns 400 and names the field.
* **clamped**: supported, but some values are reduced to what fits, or replaced by an equivalent one, as stated.
* **refused**: only the listed values, which have no effect, and empty ones are accepted. Others return 400, the name of
  the field and the reason.
* **inert**: accepted with any value, without effect on the answer.

Unknown fields return 400. `null` is the same as omitting a field, and so is an empty text, array or object in an
optional field that holds any of these, except where the table says what it means; 2.0 is the same as 2. Errors name
fields as the client sent them."""

_BACKENDS = """## By backend

Parameters that not every backend supports, by the engine's name ([sampling.md](../sampling.md) lists all). On the
other backend any value except the neutral one returns 400."""

_SAMPLING = """## Sampling

Fields of all endpoints that refer to this section. A default of `null` means the recommendation of the model's
makers, else the neutral value."""


def page() -> str:
    """The whole page."""
    return "\n".join(_Page().lines())


def bodies(*dialects: Dialect) -> dict[type[Body], list[str]]:
    """Return the bodies of those dialects (of all, where none is named), and the endpoints of each."""
    context = ApiContext(Engine(EngineConfig()), ApiSettings())
    found: dict[type[Body], list[str]] = {}
    for dialect in dialects or discover():
        for endpoint in dialect.endpoints:
            for route in endpoint(context).routes():
                for described in endpoint_specs(route.handler):
                    if described.body is not None and issubclass(described.body, Body):
                        found.setdefault(described.body, []).append(f"{route.method} {route.path}")
    return found


class _Page:
    """The page while it is written: each body is described in full where it comes first."""

    def __init__(self) -> None:
        self._sampling = rows_of(SamplingFields)
        self._described: dict[type[Body], str] = {}

    def lines(self) -> Iterator[str]:
        """Its lines, from the first to the last."""
        yield from (_INTRO, "", _BACKENDS, "", support_differences(), "", _SAMPLING, "", HEAD)
        yield from (row.line for row in self._sampling.values())
        yield from ("", "Refused in the same way, unless an endpoint supports one:", "", REFUSED_HEAD)
        yield from refused_lines(
            {name: why for name, why in SAMPLING_REFUSED.items() if not _honoured(SamplingFields, name)}
        )
        for dialect in discover():
            yield from ("", f"## {dialect.title}")
            for body, places in bodies(dialect).items():
                yield from self._body(body, ", ".join(f"`{place}`" for place in places))

    def _body(self, body: type[Body], title: str) -> Iterator[str]:
        yield from ("", f"### {title}", "")
        if (likeness := self._likeness(body)) is not None:
            yield likeness
            return
        self._described[body] = title
        samples = issubclass(body, SamplingFields)
        yield from self._honoured(body, samples)
        yield from self._refused(body, samples)
        if inert := inert_of(body):
            yield from ("", f"Inert: {', '.join(f'`{name}`' for name in inert)}.")
        for name, inner in bodies_within(body):
            if inner not in self._described:
                yield from self._body(inner, f"`{name}` of {title}")

    def _likeness(self, body: type[Body]) -> str | None:
        """Return a sentence about a body that was described, or is such a one without some fields; else None."""
        for described, title in self._described.items():
            if issubclass(described, body):
                return f"As {title}{_without(described.model_fields, body.model_fields, ', but without ')}."
        return None

    def _honoured(self, body: type[Body], samples: bool) -> Iterator[str]:
        rows = rows_of(body)
        own = [row for name, row in rows.items() if not (samples and self._sampling.get(name) == row)]
        if samples:
            yield f"The fields of [sampling](#sampling){_without(self._sampling, rows, ' but for ')}, and:"
            yield ""
        yield HEAD
        yield from (row.line for row in own)

    def _refused(self, body: type[Body], samples: bool) -> Iterator[str]:
        refused = refused_of(body)
        shared = {name for name, refusal in refused.items() if SAMPLING_REFUSED.get(name) == refusal}
        own = {name: refusal for name, refusal in refused.items() if not (samples and name in shared)}
        if samples and shared:
            yield from ("", f"Refused: those of [sampling](#sampling){', and:' if own else '.'}")
        elif own:
            yield from ("", "Refused:")
        if own:
            yield from ("", REFUSED_HEAD)
            yield from refused_lines(own)


def _without(all_names: Iterable[str], names: Container[str], lead: str) -> str:
    """Which of them are not there, after `lead`; "" where all are."""
    missing = [f"`{name}`" for name in all_names if name not in names]
    return lead + ", ".join(missing) if missing else ""


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
