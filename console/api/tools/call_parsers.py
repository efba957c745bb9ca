"""The shapes in which models write calls. Formats differ by shape and by the markers around it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from console.api.tools.json_stream import (
    Give,
    Malformed,
    Reading,
    Source,
    collect_string,
    no_constant,
    read_space,
    read_value,
)

# A call written as a JSON object: {"name": ..., "arguments": {...}}, in any order, under the names that models use.

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class Sink(Protocol):
    """Takes calls as they are read."""

    def begin(self, name: str) -> None:
        """A call of `name` begins; raises Malformed where it cannot be one."""

    def member(self, key: str) -> None:
        """It has a member that no call needs; raises Malformed where that makes it none."""

    def arguments(self, text: str) -> None:
        """More of its arguments."""

    def complete(self) -> None:
        """It is whole."""


def read_call(source: Source, sink: Sink) -> Reading[None]:
    """One call, from its { to its }. Raises Malformed."""
    call = _Call(sink)
    yield from _read_members(source, call)
    call.finish()


def read_arguments(source: Source, give: Give) -> Reading[None]:
    """A call's arguments: an object, given away as it comes; one in a string, as some models write it; null for none.

    Raises Malformed.
    """
    match (yield from source.peek()):
        case "{":
            yield from read_value(source, give)
        case '"':
            give(_object_in((yield from collect_string(source))))
        case _:
            yield from source.expect("null")
            give("{}")


class _Call:
    """A call whose members come in any order: arguments wait for the name."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._name: str | None = None
        self._early: list[str] = []
        self._has_arguments = False

    def take_name(self, name: str) -> None:
        if self._name is not None:
            raise Malformed("it has two names")
        self._name = name
        self._sink.begin(name)
        for text in self._early:
            self._sink.arguments(text)

    def take_other(self, key: str) -> None:
        self._sink.member(key)

    def begin_arguments(self) -> Give:
        if self._has_arguments:
            raise Malformed("it has arguments twice")
        self._has_arguments = True
        return self._early.append if self._name is None else self._sink.arguments

    def finish(self) -> None:
        if self._name is None:
            raise Malformed("it has no name")
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._sink.complete()


def _read_members(source: Source, call: _Call) -> Reading[None]:
    yield from source.expect("{")
    if (yield from read_space(source, _drop)) == "}":
        source.take()
        return
    while True:
        yield from read_space(source, _drop)
        key = yield from collect_string(source)
        yield from read_space(source, _drop)
        yield from source.expect(":")
        yield from read_space(source, _drop)
        yield from _read_member(source, call, key)
        if (yield from read_space(source, _drop)) == "}":
            source.take()
            return
        yield from source.expect(",")


def _read_member(source: Source, call: _Call, key: str) -> Reading[None]:
    if key in NAME_KEYS:
        call.take_name((yield from collect_string(source)))
    elif key in ARGUMENT_KEYS:
        yield from read_arguments(source, call.begin_arguments())
    elif key == "function" and (yield from source.peek()) == "{":
        yield from _read_members(source, call)
    elif key == "function":
        call.take_name((yield from collect_string(source)))
    else:
        call.take_other(key)
        yield from read_value(source, _drop)


def _object_in(text: str) -> str:
    try:
        value = json.loads(text, parse_constant=no_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Malformed("its arguments are no JSON object")
    return text if text.strip() else "{}"


def _drop(text: str) -> None:
    """White space and members that are no part of a call, an id say."""


class Schemas(Sink, Protocol):
    """A sink that knows what the tools take."""

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of the arguments of a tool; {} for one that there is not."""


class Shape(Protocol):
    """How calls are written."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What calls begin with."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that is no part of names and arguments; the tokenizer may have a control token for it."""

    def read(self, source: Source, sink: Schemas, opening: str) -> Reading[None]:
        """The calls after `opening`, one of those above. Raises Malformed."""


_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_KEY = re.compile(r"[^<>\n]+")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects between `opening` and `closing`: one, several in a row, or an array of them. The closing may lack.

    array: the model writes an array even for one.  name, arguments: under which names it writes a call's; others of
    `call_object` are read as well.
    """

    opening: str
    closing: str = ""
    array: bool = False
    name: str = "name"
    arguments: str = "arguments"

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing)))

    def read(self, source: Source, sink: Schemas, opening: str) -> Reading[None]:
        yield from source.skip_space()
        if (yield from source.tries("[")):
            yield from _read_array(source, sink)
        else:
            yield from _read_objects(source, sink)
        if (yield from source.skip_space()) and self.closing:
            yield from source.closes(self.closing)


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`opening` name `separator` {arguments} `closing`, several in a row, inside `section` where there is one.

    kind: what stands before the name. fenced: arguments stand in a Markdown block. numbered: "functions.NAME:0".
    """

    opening: str
    separator: str
    closing: str = ""
    section: tuple[str, str] = ("", "")
    kind: str = ""
    fenced: bool = False
    numbered: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section[0], self.opening)))

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (*self.section, self.opening, self.kind[self.kind.find("<") :], self.separator, self.closing)
        return tuple(text for text in texts if text.strip())

    def read(self, source: Source, sink: Schemas, opening: str) -> Reading[None]:
        if opening == self.section[0]:
            yield from source.skip_space()
            yield from source.expect(self.opening)
        while True:
            yield from self._read_one(source, sink)
            if not (yield from source.skip_space()) or not (yield from source.closes(self.opening)):
                break
        if self.section[1]:
            yield from source.closes(self.section[1])

    def _read_one(self, source: Source, sink: Schemas) -> Reading[None]:
        if self.kind:
            yield from source.expect(self.kind)
        sink.begin(self._name((yield from _name_before(source, self.separator))))
        if self.fenced:
            yield from source.skip_space()
            yield from source.tries("```json")
        yield from source.skip_space()
        yield from read_arguments(source, sink.arguments)
        sink.complete()
        yield from source.skip_space()
        if self.fenced and (yield from source.closes("```")):
            yield from source.skip_space()
        if self.closing:
            yield from source.closes(self.closing)

    def _name(self, text: str) -> str:
        return text.removeprefix("functions.").rpartition(":")[0] or text if self.numbered else text


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """[TOOL_CALLS] and an array of objects; or, as newer models write (named), [TOOL_CALLS]name[ARGS]{arguments} for
    each. Either is read."""

    named: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]",)

    @property
    def markers(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, source: Source, sink: Schemas, opening: str) -> Reading[None]:
        yield from source.skip_space()
        if (yield from source.tries("[")):
            yield from _read_array(source, sink)
        elif (yield from source.peek()) == "{":
            yield from _read_objects(source, sink)
        else:
            yield from self._read_named(source, sink)

    def _read_named(self, source: Source, sink: Schemas) -> Reading[None]:
        name = yield from _collect(source, _NAME)
        if (yield from source.tries("[CALL_ID]")):
            yield from _collect(source, _NAME)
        yield from source.tries("[ARGS]")
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Malformed("its arguments are missing")
        sink.begin(name)
        yield from read_arguments(source, sink.arguments)
        sink.complete()


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """<function=NAME> <parameter=KEY> value </parameter> ... </function>, inside <tool_call> or not (Qwen3-Coder).

    What a parameter's schema calls a string is one as it stands; the text of any other value is JSON.
    """

    @property
    def openings(self) -> tuple[str, ...]:
        return ("<tool_call>", "<function=")

    @property
    def markers(self) -> tuple[str, ...]:
        return ("<tool_call>", "</tool_call>")

    def read(self, source: Source, sink: Schemas, opening: str) -> Reading[None]:
        if opening == "<tool_call>":
            yield from source.skip_space()
            yield from source.expect("<function=")
        name = yield from _name_before(source, ">")
        sink.begin(name)
        properties = sink.schema(name).get("properties")
        lead = "{"
        while (yield from self._another(source)):
            key = yield from _name_before(source, ">", _KEY)
            sink.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            schema = properties.get(key) if isinstance(properties, dict) else None
            yield from _read_xml_value(source, sink, schema if isinstance(schema, dict) else {})
            lead = ", "
        sink.arguments("{}" if lead == "{" else "}")
        sink.complete()
        if (yield from source.skip_space()):
            yield from source.closes("</tool_call>")

    def _another(self, source: Source) -> Reading[bool]:
        yield from source.skip_space()
        tag = yield from source.tries("<parameter=", "</function>")
        if not tag:
            raise Malformed("neither a parameter nor </function> follows")
        return tag == "<parameter="


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names for a value; those of its alternatives, where it has some."""
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(map(str, named)) if isinstance(named, list) else set()
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else ():
            kinds |= kinds_of(one) if isinstance(one, Mapping) else set()
    return kinds


def _read_xml_value(source: Source, sink: Sink, schema: Mapping[str, Any]) -> Reading[None]:
    """A value up to its closing tag, without the line breaks that stand around it."""
    yield from source.tries("\r\n", "\n")
    ends = ("\n</parameter>", "</parameter>")
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        sink.arguments('"')
        ended, tail = (yield from source.until(ends, lambda text: sink.arguments(_escaped(text)), partial=True)), '"'
    else:
        pieces: list[str] = []
        ended, tail = (yield from source.until(ends, pieces.append)), _as_json("".join(pieces), kinds)
    if not ended:
        raise Malformed("a parameter has no end")
    sink.arguments(tail)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, kinds: set[str]) -> str:
    """The value that the text is, or that text as a string; True, False and None are Python's, as models write them.

    kinds: the types that it may have; where a string is one of them, it is that, if not null.
    """
    stripped = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    if "string" in kinds:
        return "null" if stripped == "null" and "null" in kinds else json.dumps(text, ensure_ascii=False)
    try:
        json.loads(stripped, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _name_before(source: Source, separator: str, pattern: re.Pattern[str] = _NAME) -> Reading[str]:
    """A name, and the separator after it."""
    yield from source.skip_space()
    name = yield from _collect(source, pattern)
    yield from source.expect(separator)
    return name


def _collect(source: Source, pattern: re.Pattern[str]) -> Reading[str]:
    """All that `pattern` matches, at least one character."""
    text = ""
    while (yield from source.more()) and (more := source.take_all(pattern)):
        text += more
    if not text:
        raise Malformed("its name is missing")
    return text


def _read_array(source: Source, sink: Sink) -> Reading[None]:
    """The objects of an array, after its [."""
    while True:
        yield from source.skip_space()
        yield from read_call(source, sink)
        yield from source.skip_space()
        if not (yield from source.tries(",")):
            break
    yield from source.expect("]")


def _read_objects(source: Source, sink: Sink, separators: tuple[str, ...] = (";", ",")) -> Reading[None]:
    """Objects in a row, with white space or a separator between them."""
    while True:
        yield from read_call(source, sink)
        if not (yield from source.skip_space()):
            return
        if (yield from source.tries(*separators)):
            yield from source.skip_space()
        if not (yield from source.more()) or (yield from source.peek()) != "{":
            return
