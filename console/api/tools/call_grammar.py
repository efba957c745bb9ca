"""Grammars for calls, in llguidance's Lark syntax: the model's own format around the tools' schemas.

These need one: that there is a call (tool_choice required, or a tool's name), that arguments match the schema (strict),
that only some tools are called (allowed tools), and that text has a format, too. Control tokens appear by their ids, as
they are no text to the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from console.api.requests.structured_output import json_grammar, lark_grammar
from console.api.tools.call_parsers import JsonCalls, KeyedCalls, MistralCalls, NamedCalls
from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat
from console.api.tools.harmony_calls import CHANNEL, CONSTRAIN, END, MESSAGE, START, HarmonyCalls
from console.api.tools.parameter_grammar import ANY_TEXT, PIECES, Spell, ToJson, parameter_rules, unsupported_keywords
from console.api.tools.parameter_parsers import GemmaCalls, KeyValueCalls, PythonCalls, XmlCalls
from engine.config import MAX_GRAMMAR_BYTES, Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import JSON_WHITESPACE

_SPACING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_TEXT_OPTIONS: Mapping[str, object] = {"lenient": True, "whitespace_pattern": JSON_WHITESPACE}
"""Of a format, which was checked without tools: with strict keywords it has none to be lenient with."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Grammar of calls after an opening marker. body: after the opening.  between: separates two blocks, None where all
    calls are in one.  rules: that the body uses."""

    opening: str
    body: str
    between: str | None
    rules: Sequence[str]


def call_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    ids: Mapping[str, int],
    text: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar of the answer, None for none.

    ids: of markers that are control tokens.  text: format of an answer that calls nothing; it has to be of JSON.
    Raises InvalidRequest for an unsupported schema. Unsupported keywords are ignored, except in strict tools.
    """
    required = choice.mode == "required" or text is not None
    is_free = len(tools) == len(callable_tools := _callable(tools, choice))
    if not required and (not _is_marked(tool_format, ids) or (is_free and not any(tool.strict for tool in tools))):
        return None
    shape, param = tool_format.shape, "tool_choice" if choice.mode == "required" else "tools"
    schema = None if text is None else _schema_of(text)
    _check_schemas(tools, choice, required, unsupported_keywords(shape))
    if schema is not None and tool_format.bare and isinstance(shape, JsonCalls):
        either = _calls_or_text(shape, callable_tools, parallel, schema)
        return json_grammar(either, param, lenient=True, max_bytes=MAX_GRAMMAR_BYTES)
    answer = "" if schema is None else f"answer: %json {_as_source(schema | {'x-guidance': _TEXT_OPTIONS})}"

    def spell(text: str) -> str:
        return _spell(text, ids)

    if isinstance(shape, HarmonyCalls):
        rules = _harmony(callable_tools, required, spell, answer)
    else:
        block = _block(tool_format, callable_tools, parallel, required, spell)
        start = _required_rules(block, parallel, answer) if required else _optional_rules(block, parallel)
        rules = [*start, *block.rules]
    return lark_grammar("\n".join(rules), param, max_bytes=MAX_GRAMMAR_BYTES)


def not_enforced(
    tool_format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, ids: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the names of strict tools whose schema cannot be enforced where the model decides whether it calls: in
    calls that are not distinguishable from text before they end, and for unsupported keywords.

    Raises InvalidRequest for a schema that is none.
    """
    if choice.mode == "required":
        return ()
    is_marked, unsupported = _is_marked(tool_format, ids), unsupported_keywords(tool_format.shape)
    return tuple(
        tool.name
        for i, tool in enumerate(tools)
        if tool.strict and choice.allows(tool.name) and not (is_marked and _is_enforceable(tool, i, unsupported))
    )


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    return [tool for tool in tools if choice.allows(tool.name)]


def _is_marked(tool_format: ToolFormat, ids: Mapping[str, int]) -> bool:
    """Return whether calls are distinguishable from text where they begin."""
    return not tool_format.bare and (not isinstance(tool_format.shape, HarmonyCalls) or START in ids)


def _schema_of(text: Grammar) -> dict[str, Any]:
    """Return the schema of a format; raises InvalidRequest for another than JSON."""
    if text.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"{text.param} cannot be used with tools, only a JSON format can: send no tools, or tool_choice none",
            param=text.param,
        )
    return dict(json.loads(text.source) if text.kind == "json_schema" else _ANY_OBJECT)


def _calls_or_text(
    shape: JsonCalls, tools: Sequence[Tool], parallel: bool, text: Mapping[str, object]
) -> dict[str, object]:
    """Return one schema of calls without a marker and of text: as rules of their own, the longest token of either would
    exclude the other."""
    place = "#/anyOf/0/items" if shape.array else "#/anyOf/0"
    calls = [
        {
            "type": "object",
            "properties": {
                shape.name: {"const": tool.name},
                shape.arguments: _moved(tool.schema, f"{place}/anyOf/{i}/properties/{shape.arguments}"),
            },
            "required": [shape.name, shape.arguments],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    several = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if parallel else {"maxItems": 1})}
    return {"anyOf": [several if shape.array else {"anyOf": calls}, _moved(text, "#/anyOf/1")]}


def _moved(schema: Mapping[str, object], place: str) -> dict[str, object]:
    """Return a schema to be part of another. place: its JSON pointer there, from which its references go."""

    def moved(value: object) -> object:
        if isinstance(value, list):
            return list(map(moved, value))
        return moved_members(value) if isinstance(value, Mapping) else value

    def moved_members(members: Mapping[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for word, value in members.items():
            if word == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[word] = f"{place}{value[1:]}"
            elif word in _OF_SCHEMAS and isinstance(value, Mapping):
                found[word] = {name: moved(each) for name, each in value.items()}
            else:
                found[word] = value if word in _OF_DATA else moved(value)
        return found

    return {word: value for word, value in moved_members(schema).items() if word not in _OF_DOCUMENTS}


def _is_enforceable(tool: Tool, index: int, unsupported: Sequence[str]) -> bool:
    """Return whether a strict tool's schema can be enforced; raises InvalidRequest where it is none."""
    try:
        json_grammar(tool.schema, _place(index))
    except InvalidRequest:
        json_grammar(tool.schema, _place(index), lenient=True)
        return False
    return not set(unsupported) & set(_keywords(tool.schema))


def _place(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _check_schemas(tools: Sequence[Tool], choice: ToolChoice, required: bool, unsupported: Sequence[str]) -> None:
    size = 0
    for i, tool in enumerate(tools):
        where = _place(i)
        if not choice.allows(tool.name):
            continue
        if required or tool.strict:
            size += len(json_grammar(tool.schema, where, lenient=not tool.strict).source)
            if size > MAX_GRAMMAR_BYTES:  # before all that follow are compiled
                raise _too_long()
        if tool.strict and (found := [word for word in unsupported if word in set(_keywords(tool.schema))]):
            raise InvalidRequest(
                f"{where}: {found[0]} cannot be enforced in the notation of this model's calls", param=where
            )


def _too_long() -> InvalidRequest:
    return InvalidRequest(f"the schemas of the tools exceed {MAX_GRAMMAR_BYTES} bytes", param="tools")


_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OF_DOCUMENTS = frozenset({"$id", "$schema", "x-guidance"})
_OF_DATA = frozenset({"enum", "const", "default", "examples", "required", "title", "description"})


def _keywords(schema: object) -> Iterator[str]:
    """Yield the keywords of a schema and of those in it: no names of properties, and no values."""
    if isinstance(schema, list):
        for each in schema:
            yield from _keywords(each)
    elif isinstance(schema, Mapping):
        for word, value in schema.items():
            yield word
            if word in _OF_SCHEMAS and isinstance(value, Mapping):
                for each in value.values():
                    yield from _keywords(each)
            elif word not in _OF_DATA:
                yield from _keywords(value)


def _required_rules(block: _Block, parallel: bool, answer: str) -> list[str]:
    """Return rules for calls, or else for the text of the rule `answer`, if any."""
    one = f"{block.opening} {block.body}".strip()
    more = f" ({block.between} block)*" if parallel and block.between is not None else ""
    rules = [f"start: calls{' | answer' if answer else ''}", f"calls: block{more}", f"block: {one}"]
    return [*rules, answer] if answer else rules


def _optional_rules(block: _Block, parallel: bool) -> list[str]:
    """Return rules for text with calls. Text ends at the first opening."""
    repeats = "*" if parallel else "?"
    token = PIECES.search(block.opening)
    head = f"head: TEXT {block.opening[token.start() :]}" if token else f"head[lazy]: TEXT {block.opening}"
    return [f"start: block{repeats} rest", f"block: head {block.body}", head, "rest: TEXT", f"TEXT: {ANY_TEXT}"]


def _block(tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, required: bool, spell: Spell) -> _Block:
    shape = tool_format.shape
    schemas = [_json(tool.schema if required or tool.strict else _ANY_OBJECT, tool.strict) for tool in tools]
    calls = "call" if not parallel else 'call (", " call)*'
    lines = "call" if not parallel else 'call ("\\n" call)*'
    match shape:
        case JsonCalls(array=True):
            body = f'"[" {calls} "]" {_spell_optional(shape.closing, spell)}'
            return _Block(_spell_optional(shape.opening, spell), body, None, _objects(shape, tools, schemas))
        case JsonCalls():
            opening = "" if tool_format.bare else spell(shape.opening)
            body = "call" if not shape.closing else f'"\\n" call "\\n" {spell(shape.closing)}'
            between = '"; "' if tool_format.bare else '"\\n"'
            return _Block(opening, body, between, _objects(shape, tools, schemas))
        case KeyedCalls():
            rules = _call_rules(tools, schemas, lambda name: spell(f"{{{json.dumps(name)}: "), '"}"')
            return _Block(spell(shape.opening), f'"[" {calls} "]" {spell(shape.closing)}', None, rules)
        case MistralCalls(named=True):
            rules = _call_rules(tools, schemas, lambda name: f"{_quoted(name)} {spell('[ARGS]')}", "")
            return _Block(spell("[TOOL_CALLS]"), "call", "", rules)
        case MistralCalls():
            body = f'/ ?/ "[" {calls} "]"'
            return _Block(spell("[TOOL_CALLS]"), body, None, _objects(JsonCalls(""), tools, schemas))
        case NamedCalls():
            return _named_block(shape, tools, schemas, parallel, spell)
        case XmlCalls() | KeyValueCalls() | GemmaCalls() | PythonCalls():
            rules = parameter_rules(shape, tools, spell, _bounded_json())
            opening = _spell_optional(next(iter(shape.markers), ""), spell)
    match shape:
        case XmlCalls(several=True):
            return _Block(opening, f'"\\n" {lines} "\\n" {spell(shape.section[1])}', None, rules)
        case XmlCalls():
            return _Block(opening, f'"\\n" call "\\n" {spell(shape.section[1])}', '"\\n"', rules)
        case KeyValueCalls():
            between = spell(shape.line) if shape.line else ""
            return _Block(opening, f"call {spell('</tool_call>')}", between, rules)
        case GemmaCalls():
            return _Block(opening, f"call {spell(shape.closing)}", "", rules)
        case PythonCalls(brackets=True):
            return _Block(opening, f'"[" {calls} "]" {_spell_optional(shape.closing, spell)}', None, rules)
        case PythonCalls():
            return _Block(opening, f"{lines} {spell(shape.closing)}", None, rules)
        case _:
            raise NotImplementedError(shape)


def _harmony(tools: Sequence[Tool], required: bool, spell: Spell, answer: str) -> list[str]:
    """Return rules of an answer that goes on after its thinking: in a new message, or in one whose header is over.

    The end of a call is the end of the answer. answer: the rule of the final message's text, if that has a format.
    """
    schemas = [_json(tool.schema if required or tool.strict else _ANY_OBJECT, tool.strict) for tool in tools]
    rules = _call_rules(tools, schemas, lambda name: f"{_quoted(name)} header", "")
    assistant = f'{spell(START)} "assistant"'
    rules += [
        f'channel: {spell(CHANNEL)} ("commentary" | "analysis")',
        f'header: channel? " " {spell(CONSTRAIN)}? "json" {spell(MESSAGE)}',
        'to_tool: channel? " to=functions." call',
    ]
    if answer:
        final = f'{spell(CHANNEL)} "final" {spell(MESSAGE)} answer'
        return [f"start: answer | ({assistant})? (to_tool | {final})", *rules, answer]
    if required:
        return [f"start: ({assistant})? to_tool", *rules]
    return [
        f"start: free | ({assistant})? message",
        f"free: TEXT ({spell(END)} {assistant} message)?",
        f'message: to_tool | {spell(CHANNEL)} ("final" | "analysis" | "commentary") {spell(MESSAGE)} free',
        f"TEXT: {ANY_TEXT}",
        *rules,
    ]


def _objects(shape: JsonCalls, tools: Sequence[Tool], schemas: Sequence[str]) -> list[str]:
    def prefix(name: str) -> str:
        return _quoted(f'{{"{shape.name}": {json.dumps(name)}, "{shape.arguments}": ')

    return _call_rules(tools, schemas, prefix, '"}"')


def _call_rules(tools: Sequence[Tool], schemas: Sequence[str], prefix: Callable[[str], str], suffix: str) -> list[str]:
    """Return one rule per tool, with prefix and suffix of its arguments."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        rules += [f"call_{i}: {prefix(tool.name)} args_{i} {suffix}".rstrip(), f"args_{i}: %json {schema}"]
    return rules


def _named_block(
    shape: NamedCalls, tools: Sequence[Tool], schemas: Sequence[str], parallel: bool, spell: Spell
) -> _Block:
    fence, fence_end = ('"```json\\n"', '"\\n```"') if shape.fenced else ("", "")

    opening = spell(shape.opening) if shape.section[0] else ""

    def prefix(name: str) -> str:
        shown = f"{_quoted(f'functions.{name}:')} /[0-9]+/" if shape.numbered else _quoted(name)
        return f"{opening} {_spell_optional(shape.kind, spell)} {shown} {spell(shape.separator)} {fence}"

    rules = _call_rules(tools, schemas, prefix, f"{fence_end} {_spell_optional(shape.closing, spell)}")
    if not opening:
        return _Block(spell(shape.opening), "call", "", rules)
    rules.append('NEWLINE: "\\n"')
    several = "call (NEWLINE? call)*" if parallel else "call"
    body = f"{several} {_spell_optional(shape.section[1], spell)}"
    return _Block(spell(shape.section[0]), body, None, rules)


def _json(schema: object, strict: bool) -> str:
    """Return a schema with the JSON spacing of templates."""
    spaced = {**schema, "x-guidance": {**_SPACING, "lenient": not strict}} if isinstance(schema, Mapping) else schema
    return _as_source(spaced)


def _as_source(schema: object) -> str:
    """Return a schema for the grammar, whose dialect `::=` would switch."""
    return json.dumps(schema).replace("::=", "\\u003a:=")


def _bounded_json() -> ToJson:
    """Return `_json`, which raises InvalidRequest once the schemas together are too long: a parameter that refers to a
    definition comes with all of them."""
    room = MAX_GRAMMAR_BYTES

    def bounded(schema: object, strict: bool) -> str:
        nonlocal room
        text = _json(schema, strict)
        room -= len(text)
        if room < 0:
            raise _too_long()
        return text

    return bounded


def _quoted(text: str) -> str:
    """Quote a text for the grammar, as in JSON."""
    return json.dumps(text)


def _spell(text: str, ids: Mapping[str, int]) -> str:
    """Return a text for the grammar, in which control tokens stand by their ids."""
    if not ids:
        return _quoted(text)
    tokens = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    pieces = re.split(f"({tokens})", text)
    return " ".join(f"<[{ids[piece]}]>" if piece in ids else _quoted(piece) for piece in pieces if piece)


def _spell_optional(marker: str, spell: Spell) -> str:
    return spell(marker) if marker else ""
