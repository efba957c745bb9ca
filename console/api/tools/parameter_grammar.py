"""Grammars of calls whose arguments are written one by one: rules for each tool, in the order of its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from console.api.tools.calls import Tool
from console.api.tools.parameter_parsers import GemmaCalls, KeyValueCalls, PythonCalls, XmlCalls, types_of

Spell = Callable[[str], str]
"""Returns a text in the grammar's syntax, with its control tokens by their ids."""

ToJson = Callable[[object, bool], str]
"""Returns a schema for %json, strict or not."""

PIECES = re.compile(r"<\[[0-9]+\]>")
"""A control token in the grammar's syntax."""

ANY_TEXT = r"/(.|\n)*/"

STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_NESTED_KEYWORDS = (
    *STRING_KEYWORDS,
    "minItems",
    "maxItems",
    "uniqueItems",
    "$ref",
    "allOf",
    "not",
    "patternProperties",
)
_SCALARS = {"integer", "number", "boolean", "null"}

ParameterCalls = XmlCalls | KeyValueCalls | GemmaCalls | PythonCalls


def unsupported_keywords(shape: object) -> tuple[str, ...]:
    """Return keywords of schemas that grammars of this shape do not enforce."""
    match shape:
        case XmlCalls() | KeyValueCalls():
            return STRING_KEYWORDS
        case GemmaCalls():
            return _NESTED_KEYWORDS
        case _:
            return ()


def parameter_rules(shape: ParameterCalls, tools: Sequence[Tool], spell: Spell, to_json: ToJson) -> list[str]:
    """Return the rules of calls of these tools. `call` is the first."""
    notation = _notation(shape, spell, to_json)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}", *notation.shared]
    for i, tool in enumerate(tools):
        before, after = notation.around(tool.name)
        rules.append(f"call_{i}: {before} args_{i} {after}".rstrip())
        rules += _object_rules(f"args_{i}", tool.schema, tool, notation)
    return rules


class _Notation(Protocol):
    """A way to write arguments. separator: between two, in the grammar's syntax.  shared: rules that values use."""

    @property
    def separator(self) -> str: ...

    @property
    def shared(self) -> list[str]: ...

    def around(self, name: str) -> tuple[str, str]:
        """Return what stands before and after the arguments of a call."""

    def key(self, key: str, schema: Mapping[str, Any]) -> str:
        """Return what stands before a value."""

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        """Return the expression of a value and what follows it, and the rules that it uses."""


def _object_rules(rule: str, schema: Mapping[str, Any], tool: Tool, notation: _Notation) -> list[str]:
    """Return rules of an object's members in the order of its schema; optional ones may be missing."""
    properties = schema.get("properties")
    required = schema.get("required") or ()
    members = list(properties.items()) if isinstance(properties, Mapping) else []
    rules: list[str] = []
    for j, (key, each) in enumerate(members):
        fields = each if isinstance(each, Mapping) else {}
        value, *more = notation.value(f"{rule}_{j}_v", each, tool)
        rules += [f"{rule}_{j}: {notation.key(key, fields)} {value}", *more]
    are_required = [key in required for key, _ in members]
    return [f"{rule}: {_sequence(rule, are_required, notation.separator, rules)}", *rules]


def _sequence(rule: str, are_required: Sequence[bool], separator: str, rules: list[str]) -> str:
    """Return the expression of members in order, between separators. Adds to `rules`."""
    count = len(are_required)
    if not separator:
        return " ".join(f"{rule}_{j}{'' if is_required else '?'}" for j, is_required in enumerate(are_required)) or '""'
    tails = [""] * (count + 1)
    for j in range(count - 1, 0, -1):
        member = f"{separator} {rule}_{j}"
        rules.append(f"{rule}_t{j}: {member if are_required[j] else f'({member})?'} {tails[j + 1]}".rstrip())
        tails[j] = f"{rule}_t{j}"
    starts = []
    for j, is_required in enumerate(are_required):
        starts.append(f"{rule}_{j} {tails[j + 1]}".rstrip())
        if is_required:
            return " | ".join(starts)
    return f"({' | '.join(starts)})?" if starts else '""'


def _notation(shape: ParameterCalls, spell: Spell, to_json: ToJson) -> _Notation:
    match shape:
        case XmlCalls():
            return _Xml(shape, spell, to_json)
        case KeyValueCalls():
            return _KeyValue(shape, spell, to_json)
        case GemmaCalls():
            return _Gemma(shape, spell, to_json)
        case PythonCalls():
            return _Python(spell, to_json)


@dataclass
class _Tagged:
    """Values as text up to a closing tag."""

    spell: Spell
    to_json: ToJson
    ending: str
    separator: str = ""

    @property
    def shared(self) -> list[str]:
        return text_rules(self.spell(self.ending), self.ending)

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        fields = schema if isinstance(schema, Mapping) else {}
        closing = self.spell(self.ending)
        if "string" not in types_of(fields):
            return [f"{rule} {closing}", f"{rule}: %json {self.to_json(_whole(schema, tool), tool.strict)}"]
        if texts := _texts(fields):
            return [f"({' | '.join(map(self.spell, texts))}) {closing}"]
        return ["text"]


class _Xml(_Tagged):
    def __init__(self, shape: XmlCalls, spell: Spell, to_json: ToJson) -> None:
        super().__init__(spell, to_json, f"{shape.line}{shape.parameter[1]}")
        self._shape = shape

    def around(self, name: str) -> tuple[str, str]:
        quote = '"' if self._shape.quoted else ""
        return self.spell(f"{self._shape.call[0]}{name}{quote}>\n"), self.spell(self._shape.call[1])

    def key(self, key: str, schema: Mapping[str, Any]) -> str:
        quote = '"' if self._shape.quoted else ""
        is_text = "string" in types_of(schema)
        attribute = f' string="{"true" if is_text else "false"}"' if self._shape.typed else ""
        return self.spell(f"{self._shape.parameter[0]}{key}{quote}{attribute}>{self._shape.line}")

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        value, *more = super().value(rule, schema, tool)
        return [f'{value} "\\n"', *more]


class _KeyValue(_Tagged):
    def __init__(self, shape: KeyValueCalls, spell: Spell, to_json: ToJson) -> None:
        super().__init__(spell, to_json, "</arg_value>")
        self._line = shape.line

    def around(self, name: str) -> tuple[str, str]:
        return self.spell(f"{name}{self._line}"), ""

    def key(self, key: str, schema: Mapping[str, Any]) -> str:
        return self.spell(f"<arg_key>{key}</arg_key>{self._line}<arg_value>")

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        value, *more = super().value(rule, schema, tool)
        return [f"{value} {self.spell(self._line)}" if self._line else value, *more]


class _Python:
    """Strings, arrays and objects are as in JSON, which Python reads alike but for constants."""

    separator = '", "'

    def __init__(self, spell: Spell, to_json: ToJson) -> None:
        self._spell = spell
        self._to_json = to_json
        self.shared: list[str] = []

    def around(self, name: str) -> tuple[str, str]:
        return self._spell(f"{name}("), '")"'

    def key(self, key: str, schema: Mapping[str, Any]) -> str:
        return self._spell(f"{key}=")

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        if isinstance(schema, Mapping) and types_of(schema) == {"boolean"} and not {"const", "enum"} & schema.keys():
            return ['("True" | "False")']
        return [rule, f"{rule}: %json {self._to_json(_whole(schema, tool), tool.strict)}"]


class _Gemma:
    separator = '","'

    def __init__(self, shape: GemmaCalls, spell: Spell, to_json: ToJson) -> None:
        self._quote = shape.quote
        self._spell = spell
        self._to_json = to_json
        quote = spell(shape.quote)
        any_scalar = to_json({"type": ["number", "boolean", "null"]}, False)
        self.shared = [
            *text_rules(quote, shape.quote),
            f"g_string: {quote} text",
            f"g_scalar: %json {any_scalar}",
            "g_value: g_string | g_scalar | g_array | g_object",
            'g_array: "[" (g_value ("," g_value)*)? "]"',
            'g_object: "{" (g_member ("," g_member)*)? "}"',
            'g_member: /[A-Za-z_][A-Za-z0-9_]*/ ":" g_value',
        ]

    def around(self, name: str) -> tuple[str, str]:
        return self._spell(f"call:{name}{{"), '"}"'

    def key(self, key: str, schema: Mapping[str, Any]) -> str:
        return self._spell(f"{key}:")

    def value(self, rule: str, schema: object, tool: Tool) -> list[str]:
        fields = schema if isinstance(schema, Mapping) else {}
        choices = [fields["const"]] if "const" in fields else fields.get("enum")
        if isinstance(choices, list) and all(isinstance(each, str | int | float | None) for each in choices):
            return [f"({' | '.join(map(self._choice, choices))})"]
        alternatives = fields.get("anyOf") or fields.get("oneOf")
        if isinstance(alternatives, list):
            return self._alternatives(rule, alternatives, tool)
        types = types_of(fields)
        if types == {"string"}:
            return ["g_string"]
        if types and types <= _SCALARS:
            return [rule, f"{rule}: %json {self._to_json(schema, tool.strict)}"]
        if types == {"array"}:
            item, *more = self.value(f"{rule}_i", fields.get("items"), tool)
            return [f'"[" ({item} ("," {item})*)? "]"', *more]
        if types == {"object"} and isinstance(fields.get("properties"), Mapping):
            return [f'"{{" {rule} "}}"', *_object_rules(rule, fields, tool, self)]
        return ["g_object" if types == {"object"} else "g_value"]

    def _alternatives(self, rule: str, schemas: Sequence[object], tool: Tool) -> list[str]:
        values, rules = [], []
        for i, each in enumerate(schemas):
            value, *more = self.value(f"{rule}_{i}", each, tool)
            values.append(value)
            rules += more
        return [f"({' | '.join(values)})", *rules]

    def _choice(self, value: object) -> str:
        return self._spell(f"{self._quote}{value}{self._quote}" if isinstance(value, str) else json.dumps(value))


def text_rules(spelled: str, ending: str) -> list[str]:
    """Return the rule `text`: any text up to and with an ending. spelled: the ending in the grammar's syntax."""
    if (token := PIECES.search(spelled)) is None:
        return [f"text[lazy]: /(.|\\n)*{_regex(ending)}/"]
    literals = re.findall(r'"(?:[^"\\]|\\.)*"', spelled[: token.start()])
    before = "".join(map(json.loads, literals))
    return [f"text: TEXT_BEFORE {spelled[token.start() :]}", f"TEXT_BEFORE: /(.|\\n)*{_regex(before)}/"]


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts that a schema allows, an empty list for any."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) and all(isinstance(each, str) for each in choices) else []


def _whole(schema: object, tool: Tool) -> object:
    """Return a parameter's schema with the definitions that it may refer to."""
    shared = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
    return {**schema, **shared} if isinstance(schema, Mapping) and shared and _refers(schema) else schema


def _refers(schema: object) -> bool:
    """Return whether a parameter's schema refers to a definition."""
    return '"$ref"' in json.dumps(schema)
