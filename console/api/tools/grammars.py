"""Answers held to calls: a grammar, in llguidance's Lark syntax, of the model's own format around the tools' schemas.

Two demands make one: that there is a call (tool_choice required, or a tool's name), and that the arguments fit the
schema (strict). Control tokens stand in it by their ids, for they are no text to the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from console.api.structured import json_grammar, lark_grammar
from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat
from console.api.tools.shapes import JsonCalls, MistralCalls, NamedCalls, XmlCalls, kinds_of
from engine.config import MAX_GRAMMAR_BYTES, Grammar
from engine.errors import InvalidRequest

Spell = Callable[[str], str]
"""A marker as the grammar has it."""

_SPACING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Block:
    """Calls from an opening marker on. body: what follows the opening.  again: what stands between two blocks, None
    where all calls are in one.  rules: that the body refers to."""

    opening: str
    body: str
    again: str | None
    rules: Sequence[str]


def call_grammar(
    written: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, ids: Mapping[str, int]
) -> Grammar | None:
    """What the answer is held to, None for nothing. ids: those markers that are control tokens.

    Raises InvalidRequest for strict tools where this model's calls cannot be told from text before they are whole, and
    for a schema that nothing can be held to. What keywords ask that no answer can be held to is left aside, but not in
    strict tools.
    """
    required = choice.mode == "required"
    strict = next((i for i, tool in enumerate(tools) if tool.strict), None)
    if not required and strict is None:
        return None
    if not required and written.bare:
        raise InvalidRequest(
            f"strict needs tool_choice required, or a tool's name, here: {written.name} calls begin like any answer",
            param=f"tools[{strict}].function.strict",
        )
    _check_schemas(tools, required, isinstance(written.shape, XmlCalls))
    callable_tools = [tool for tool in tools if choice.name in ("", tool.name)]
    block = _block(written, callable_tools, parallel, required, lambda marker: _spelled(marker, ids))
    rules = _required(block, parallel) if required else _at_will(block, parallel, written.shape.openings[0] in ids)
    source = "\n".join([*rules, *block.rules])
    return lark_grammar(source, "tool_choice" if required else "tools", max_bytes=MAX_GRAMMAR_BYTES)


def _check_schemas(tools: Sequence[Tool], required: bool, is_xml: bool) -> None:
    size = 0
    for i, tool in enumerate(tools):
        where = f"tools[{i}].function.parameters"
        if required or tool.strict:
            size += len(json_grammar(tool.schema, where, lenient=not tool.strict).source)
            if size > MAX_GRAMMAR_BYTES:  # before all that follow are compiled
                raise InvalidRequest(
                    f"the schemas of tools have too many bytes; together they may have {MAX_GRAMMAR_BYTES}",
                    param="tools",
                )
        if (
            tool.strict
            and is_xml
            and (held := [word for word in _OF_STRINGS if f'"{word}"' in json.dumps(tool.schema)])
        ):
            raise InvalidRequest(
                f"{where}: {held[0]} cannot be held to here, for this model writes strings as plain text", param=where
            )


def _required(block: _Block, parallel: bool) -> list[str]:
    one = f"{block.opening} {block.body}".strip()
    more = f" ({block.again} block)*" if parallel and block.again is not None else ""
    return [f"start: block{more}", f"block: {one}"]


def _at_will(block: _Block, parallel: bool, is_token: bool) -> list[str]:
    """Any text, with calls in it. Text ends at the first opening."""
    repeats = "*" if parallel else "?"
    head = f"head: TEXT {block.opening}" if is_token else f"head[lazy]: TEXT {block.opening}"
    return [f"start: block{repeats} rest", f"block: head {block.body}", head, "rest: TEXT", "TEXT: /(.|\\n)*/"]


def _block(written: ToolFormat, tools: Sequence[Tool], parallel: bool, required: bool, spell: Spell) -> _Block:
    shape = written.shape
    schemas = [_json(tool.schema if required or tool.strict else _ANY_OBJECT, tool.strict) for tool in tools]
    many = "call" if not parallel else 'call (", " call)*'
    match shape:
        case JsonCalls(array=True):
            body = f'"[" {many} "]" {_spelled_if(shape.closing, spell)}'
            return _Block(spell(shape.opening), body, None, _objects(shape, tools, schemas))
        case JsonCalls():
            opening = "" if written.bare else spell(shape.opening)
            body = "call" if not shape.closing else f'"\\n" call "\\n" {spell(shape.closing)}'
            again = '"; "' if written.bare else '"\\n"'
            return _Block(opening, body, again, _objects(shape, tools, schemas))
        case MistralCalls(named=True):
            rules = _named(tools, schemas, lambda name: f"{_quoted(name)} {spell('[ARGS]')}", "")
            return _Block(spell("[TOOL_CALLS]"), "call", "", rules)
        case MistralCalls():
            body = f'/ ?/ "[" {many} "]"'
            return _Block(spell("[TOOL_CALLS]"), body, None, _objects(JsonCalls(""), tools, schemas))
        case NamedCalls():
            return _named_block(shape, tools, schemas, parallel, spell)
        case XmlCalls():
            return _Block(spell("<tool_call>"), '"\\n" call "\\n" ' + spell("</tool_call>"), '"\\n"', _xml(tools))
        case _:
            raise NotImplementedError(shape)


def _objects(shape: JsonCalls, tools: Sequence[Tool], schemas: Sequence[str]) -> list[str]:
    def lead(name: str) -> str:
        return _quoted(f'{{"{shape.name}": {json.dumps(name)}, "{shape.arguments}": ')

    return _named(tools, schemas, lead, '"}"')


def _named(tools: Sequence[Tool], schemas: Sequence[str], lead: Callable[[str], str], tail: str) -> list[str]:
    """One rule for each tool, what stands before its arguments and after them included."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        rules += [f"call_{i}: {lead(tool.name)} args_{i} {tail}".rstrip(), f"args_{i}: %json {schema}"]
    return rules


def _named_block(
    shape: NamedCalls, tools: Sequence[Tool], schemas: Sequence[str], parallel: bool, spell: Spell
) -> _Block:
    fence, fence_end = ('"```json\\n"', '"\\n```"') if shape.fenced else ("", "")

    def lead(name: str) -> str:
        kind = " ".join(spell(part) for part in _parts(shape.kind))
        shown = f"{_quoted(f'functions.{name}:')} /[0-9]+/" if shape.numbered else _quoted(name)
        return f"{spell(shape.opening)} {kind} {shown} {spell(shape.separator)} {fence}"

    rules = _named(tools, schemas, lead, f"{fence_end} {_spelled_if(shape.closing, spell)}")
    rules.append('NEWLINE: "\\n"')
    several = "call (NEWLINE? call)*" if parallel else "call"
    body = f"{several} {_spelled_if(shape.section[1], spell)}"
    return _Block(spell(shape.section[0]), body, None, rules)


def _xml(tools: Sequence[Tool]) -> list[str]:
    """Parameters in the order of the schema; those that are not required may lack."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}", "text[lazy]: /(.|\\n)*\\n<\\/parameter>/"]
    for i, tool in enumerate(tools):
        properties = tool.schema.get("properties")
        parameters = properties if isinstance(properties, dict) else {}
        required = tool.schema.get("required") or ()
        uses = [f"p_{i}_{j}{'' if key in required else '?'}" for j, key in enumerate(parameters)]
        head = _quoted(f"<function={tool.name}>\n")
        rules.append(f'call_{i}: {head} {" ".join(uses)} "</function>"')
        for j, (key, schema) in enumerate(parameters.items()):
            head = _quoted(f"<parameter={key}>\n")
            value, *more = _xml_value(f"v_{i}_{j}", tool, schema)
            rules += [f'p_{i}_{j}: {head} {value} "\\n"', *more]
    return rules


def _xml_value(rule: str, tool: Tool, schema: object) -> list[str]:
    """What holds a parameter's value and its closing tag, and the rules that it refers to."""
    known = schema if isinstance(schema, Mapping) else {}
    choices = [known["const"]] if "const" in known else known.get("enum")
    if "string" not in kinds_of(known):
        shared = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
        whole = {**known, **shared} if isinstance(schema, Mapping) else schema
        return [f'{rule} "\\n</parameter>"', f"{rule}: %json {_json(whole, tool.strict)}"]
    if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return [f'({" | ".join(map(_quoted, choices))}) "\\n</parameter>"']
    return ["text"]


def _json(schema: object, strict: bool) -> str:
    """A schema in the spacing that templates write JSON in. `::=` would make the grammar another dialect's."""
    spaced = {**schema, "x-guidance": {**_SPACING, "lenient": not strict}} if isinstance(schema, Mapping) else schema
    return json.dumps(spaced).replace("::=", "\\u003a:=")


def _quoted(text: str) -> str:
    """A text as the grammar's strings have it, which are JSON's."""
    return json.dumps(text)


def _spelled(marker: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[marker]}]>" if marker in ids else _quoted(marker)


def _spelled_if(marker: str, spell: Spell) -> str:
    return spell(marker) if marker else ""


def _parts(kind: str) -> list[str]:
    """DeepSeek's `function` and the control token after it."""
    at = kind.find("<")
    return [kind[:at], kind[at:]] if at > 0 else [kind] if kind else []
