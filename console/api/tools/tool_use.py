"""ToolUse: what one request asks about tools, for the model that answers it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.api.requests.structured_output import json_grammar, lark_grammar
from console.api.tools.call_parsers import JsonCalls, MistralCalls, NamedCalls, XmlCalls, kinds_of
from console.api.tools.calls import Tool, ToolChoice
from console.api.tools.formats import ToolFormat, known_format
from console.api.tools.stream_reader import CallReader
from engine.backends.base import FinishReason
from engine.config import MAX_GRAMMAR_BYTES, Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

# Answers held to calls: a grammar, in llguidance's Lark syntax, of the model's own format around the tools' schemas.
#
# Two demands make one: that there is a call (tool_choice required, or a tool's name), and that the arguments fit the
# schema (strict). Control tokens stand in it by their ids, for they are no text to the grammar.

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


AUTO = ToolChoice("auto")

_ONE_CALL = "only supports single tool-calls"
"""What Llama's templates say of themselves."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is told of and may call.

    written: how it writes calls, None where it is told of no tools.  grammar: what the answer is held to.
    required: that is calls and nothing else.
    shown_ids: control tokens that mark calls, which the text must show; hidden: what they are in the text.
    """

    tools: tuple[Tool, ...] = ()
    written: ToolFormat | None = None
    parallel: bool = True
    required: bool = False
    grammar: Grammar | None = None
    shown_ids: tuple[int, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def definitions(self) -> list[dict[str, object]] | None:
        """What the chat template is told."""
        return [tool.definition() for tool in self.tools] or None

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The same, with what calls ask of the engine. Raises InvalidRequest where a grammar is asked for twice."""
        if self.written is None:
            return params
        if params.grammar is not None:
            raise InvalidRequest(
                f"{params.grammar.param} holds the whole answer to a format, so that it cannot call tools: "
                "send no tools, or tool_choice none",
                param=params.grammar.param,
            )
        return msgspec.structs.replace(params, grammar=self.grammar, shown_token_ids=self.shown_ids)

    def reader(self, id_prefix: str = "call_") -> CallReader | None:
        """What reads one answer; None where it is text and nothing else. id_prefix: of the calls' ids."""
        if self.written is None:
            return None
        return CallReader(
            self.written,
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
    """What a request with these tools comes to. parallel: whether one answer may make several calls; where the choice
    names a tool, it makes one.

    A model that may call none is told of none. Raises InvalidRequest where it knows no tools or writes calls in a way
    that is not known here, and for a choice that there is not.
    """
    _check(tools, choice)
    if not tools or choice.mode == "none":
        return NO_TOOLS
    written = known_format(tokenizer)
    parallel = parallel and not choice.name and not _takes_one_call(tokenizer)
    marks = {marker: tokenizer.token_to_id(marker) for marker in written.shape.markers}
    shown = {mark: token_id for mark, token_id in marks.items() if token_id in tokenizer.special_ids}
    ids = {mark: token_id for mark, token_id in shown.items() if token_id is not None}
    return ToolUse(
        tools=tuple(tools),
        written=written,
        parallel=parallel,
        required=choice.mode == "required",
        grammar=call_grammar(written, tools, choice, parallel, ids),
        shown_ids=tuple(ids.values()),
        hidden=tuple(ids),
    )


def finish_of(reader: CallReader | None, finish: FinishReason | None) -> FinishReason | Literal["tool_calls"] | None:
    """Why an answer ended, as OpenAI names it: one that calls tools and was not cut off ends with `tool_calls`."""
    return "tool_calls" if reader is not None and reader.called and finish == "stop" else finish


def _takes_one_call(tokenizer: Tokenizer) -> bool:
    """Whether the model's template refuses messages with several calls, as Llama's do: what it answers with several
    could not be followed up."""
    template = tokenizer.tool_template
    return template is not None and _ONE_CALL in template.source


def _check(tools: Sequence[Tool], choice: ToolChoice) -> None:
    counts = Counter(tool.name for tool in tools)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidRequest(f"tools has two of the name {twice[0]!r}", param="tools")
    if not tools and choice.mode == "required":
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice.name and choice.name not in counts:
        raise InvalidRequest(f"tool_choice names {choice.name!r}, which is none of the tools", param="tool_choice")
