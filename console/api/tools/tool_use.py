"""ToolUse: the tools of one request, for the model that answers it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.api.requests.structured_output import json_grammar, lark_grammar
from console.api.tools.call_parsers import JsonCalls, MistralCalls, NamedCalls, XmlCalls, types_of
from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat, require_format
from console.api.tools.stream_reader import CallReader
from engine.backends.base import FinishReason
from engine.config import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

# Grammars for calls, in llguidance's Lark syntax: the model's own format around the tools' schemas.
#
# Two options need one: that there is a call (tool_choice required, or a tool's name), and that arguments match the
# schema (strict). Control tokens appear by their ids, as they are no text to the grammar.

Spell = Callable[[str], str]
"""Returns a marker in the grammar's syntax."""

_SPACING: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Block:
    """Grammar of calls after an opening marker. body: after the opening.  between: separates two blocks, None where all
    calls are in one.  rules: that the body uses."""

    opening: str
    body: str
    between: str | None
    rules: Sequence[str]


def call_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, ids: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of the answer, None for none. ids: of markers that are control tokens.

    Raises InvalidRequest for strict tools where this model's calls are not distinguishable from text before they end,
    and for an unsupported schema. Unsupported keywords are ignored, except in strict tools.
    """
    required = choice.mode == "required"
    strict = next((i for i, tool in enumerate(tools) if tool.strict), None)
    if not required and strict is None:
        return None
    if not required and tool_format.bare:
        raise InvalidRequest(
            f"strict needs tool_choice required or a tool name: {tool_format.name} calls start like any answer",
            param=f"tools[{strict}].function.strict",
        )
    _check_schemas(tools, required, isinstance(tool_format.shape, XmlCalls))
    callable_tools = [tool for tool in tools if choice.name in ("", tool.name)]
    block = _block(tool_format, callable_tools, parallel, required, lambda marker: _spell(marker, ids))
    rules = (
        _required_rules(block, parallel)
        if required
        else _optional_rules(block, parallel, tool_format.shape.openings[0] in ids)
    )
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
                    f"the schemas of the tools exceed {MAX_GRAMMAR_BYTES} bytes",
                    param="tools",
                )
        if (
            tool.strict
            and is_xml
            and (unsupported := [word for word in _STRING_KEYWORDS if f'"{word}"' in json.dumps(tool.schema)])
        ):
            raise InvalidRequest(
                f"{where}: {unsupported[0]} cannot be enforced, as this model writes strings as plain text", param=where
            )


def _required_rules(block: _Block, parallel: bool) -> list[str]:
    one = f"{block.opening} {block.body}".strip()
    more = f" ({block.between} block)*" if parallel and block.between is not None else ""
    return [f"start: block{more}", f"block: {one}"]


def _optional_rules(block: _Block, parallel: bool, is_token: bool) -> list[str]:
    """Return rules for text with calls. Text ends at the first opening."""
    repeats = "*" if parallel else "?"
    head = f"head: TEXT {block.opening}" if is_token else f"head[lazy]: TEXT {block.opening}"
    return [f"start: block{repeats} rest", f"block: head {block.body}", head, "rest: TEXT", "TEXT: /(.|\\n)*/"]


def _block(tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, required: bool, spell: Spell) -> _Block:
    shape = tool_format.shape
    schemas = [_json(tool.schema if required or tool.strict else _ANY_OBJECT, tool.strict) for tool in tools]
    calls = "call" if not parallel else 'call (", " call)*'
    match shape:
        case JsonCalls(array=True):
            body = f'"[" {calls} "]" {_spell_optional(shape.closing, spell)}'
            return _Block(spell(shape.opening), body, None, _objects(shape, tools, schemas))
        case JsonCalls():
            opening = "" if tool_format.bare else spell(shape.opening)
            body = "call" if not shape.closing else f'"\\n" call "\\n" {spell(shape.closing)}'
            between = '"; "' if tool_format.bare else '"\\n"'
            return _Block(opening, body, between, _objects(shape, tools, schemas))
        case MistralCalls(named=True):
            rules = _call_rules(tools, schemas, lambda name: f"{_quoted(name)} {spell('[ARGS]')}", "")
            return _Block(spell("[TOOL_CALLS]"), "call", "", rules)
        case MistralCalls():
            body = f'/ ?/ "[" {calls} "]"'
            return _Block(spell("[TOOL_CALLS]"), body, None, _objects(JsonCalls(""), tools, schemas))
        case NamedCalls():
            return _named_block(shape, tools, schemas, parallel, spell)
        case XmlCalls():
            return _Block(spell("<tool_call>"), '"\\n" call "\\n" ' + spell("</tool_call>"), '"\\n"', _xml(tools))
        case _:
            raise NotImplementedError(shape)


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

    def prefix(name: str) -> str:
        kind = " ".join(spell(part) for part in _parts(shape.kind))
        shown = f"{_quoted(f'functions.{name}:')} /[0-9]+/" if shape.numbered else _quoted(name)
        return f"{spell(shape.opening)} {kind} {shown} {spell(shape.separator)} {fence}"

    rules = _call_rules(tools, schemas, prefix, f"{fence_end} {_spell_optional(shape.closing, spell)}")
    rules.append('NEWLINE: "\\n"')
    several = "call (NEWLINE? call)*" if parallel else "call"
    body = f"{several} {_spell_optional(shape.section[1], spell)}"
    return _Block(spell(shape.section[0]), body, None, rules)


def _xml(tools: Sequence[Tool]) -> list[str]:
    """Return rules with parameters in the order of the schema; optional ones may be missing."""
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
    """Return the expression of a parameter's value and closing tag, and the rules that it uses."""
    schema_fields = schema if isinstance(schema, Mapping) else {}
    choices = [schema_fields["const"]] if "const" in schema_fields else schema_fields.get("enum")
    if "string" not in types_of(schema_fields):
        shared = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
        whole = {**schema_fields, **shared} if isinstance(schema, Mapping) else schema
        return [f'{rule} "\\n</parameter>"', f"{rule}: %json {_json(whole, tool.strict)}"]
    if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return [f'({" | ".join(map(_quoted, choices))}) "\\n</parameter>"']
    return ["text"]


def _json(schema: object, strict: bool) -> str:
    """Return a schema with the JSON spacing of templates. `::=` would switch the grammar's dialect."""
    spaced = {**schema, "x-guidance": {**_SPACING, "lenient": not strict}} if isinstance(schema, Mapping) else schema
    return json.dumps(spaced).replace("::=", "\\u003a:=")


def _quoted(text: str) -> str:
    """Quote a text for the grammar, as in JSON."""
    return json.dumps(text)


def _spell(marker: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[marker]}]>" if marker in ids else _quoted(marker)


def _spell_optional(marker: str, spell: Spell) -> str:
    return spell(marker) if marker else ""


def _parts(kind: str) -> list[str]:
    """Split DeepSeek's `function` from the control token after it."""
    at = kind.find("<")
    return [kind[:at], kind[at:]] if at > 0 else [kind] if kind else []


AUTO = ToolChoice("auto")

_ONE_CALL = "only supports single tool-calls"
"""Text in Llama's templates."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call.

    tool_format: how it writes calls, None without tools.  grammar: of the answer, if it needs one.
    required: True if the answer is only calls.
    shown_ids: control tokens of calls, which the text must include; hidden: their texts.
    """

    tools: tuple[Tool, ...] = ()
    tool_format: ToolFormat | None = None
    parallel: bool = True
    required: bool = False
    grammar: Grammar | None = None
    shown_ids: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def definitions(self) -> list[dict[str, object]] | None:
        """Definitions for the chat template; None without tools."""
        return [tool.definition() for tool in self.tools] or None

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the grammar and tokens for calls. Raises InvalidRequest where they have another
        grammar."""
        if self.tool_format is None:
            return params
        if params.grammar is not None:
            raise InvalidRequest(
                f"{params.grammar.param} sets the format of the whole answer, so that it cannot call tools: "
                "send no tools, or tool_choice none",
                param=params.grammar.param,
            )
        return msgspec.structs.replace(params, grammar=self.grammar, shown_token_ids=self.shown_ids)

    def reader(self, id_prefix: str = "call_") -> CallReader | None:
        """Return a reader of one answer; None where it cannot have calls. id_prefix: of the calls' ids."""
        if self.tool_format is None:
            return None
        return CallReader(
            self.tool_format,
            self.tools,
            one=not self.parallel,
            required=self.required,
            hidden=self.hidden,
            id_prefix=id_prefix,
        )


NO_TOOLS = ToolUse()


def tool_use(
    tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice = AUTO, *, parallel: bool = True
) -> ToolUse:
    """Return the ToolUse of a request. parallel: True if one answer may have several calls; with a named tool, it has
    one.

    Raises InvalidRequest where the model does not support tools or its format is not supported, and for an unknown tool
    in the choice.
    """
    _check_choice(tools, choice)
    if choice.allowed is not None:
        tools = [tool for tool in tools if tool.name in choice.allowed]
    if not tools or choice.mode == "none":
        return NO_TOOLS
    tool_format = require_format(tokenizer)
    parallel = parallel and not choice.name and not _allows_one_call(tokenizer)
    marker_ids = {marker: tokenizer.token_to_id(marker) for marker in tool_format.shape.markers}
    shown = {marker: token_id for marker, token_id in marker_ids.items() if token_id in tokenizer.special_ids}
    ids = {marker: token_id for marker, token_id in shown.items() if token_id is not None}
    return ToolUse(
        tools=tuple(tools),
        tool_format=tool_format,
        parallel=parallel,
        required=choice.mode == "required",
        grammar=call_grammar(tool_format, tools, choice, parallel, ids),
        shown_ids=tuple(ids.values()),
        hidden=tuple(ids),
    )


def finish_of(reader: CallReader | None, finish: FinishReason | None) -> FinishReason | Literal["tool_calls"] | None:
    """Return the finish reason in OpenAI's names: `tool_calls` for an answer with complete calls."""
    return "tool_calls" if reader is not None and reader.has_calls and finish == "stop" else finish


def _allows_one_call(tokenizer: Tokenizer) -> bool:
    """Return whether the model's template refuses messages with several calls, as Llama's do: an answer with several
    could not be continued."""
    template = tokenizer.tool_template
    return template is not None and _ONE_CALL in template.source


def _check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    counts = Counter(tool.name for tool in tools)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise InvalidRequest(f"tools has two named {duplicates[0]!r}", param="tools")
    if not tools and choice.mode == "required":
        raise InvalidRequest("tool_choice requires a call, but tools is empty", param="tool_choice")
    if unknown := sorted((choice.allowed or {choice.name}) - {*counts, ""}):
        raise InvalidRequest(f"tool_choice names {unknown[0]!r}, which is not in tools", param="tool_choice")
