"""Parsers of calls whose arguments are written one by one, in tags or other notations than JSON.

Where a notation has no types, the tool's schema decides: a parameter of type string is plain text, any other JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from console.api.tools.call_parsers import Schemas, Sink, collect, name_before
from console.api.tools.json_stream import (
    MAX_DEPTH,
    Emit,
    Malformed,
    Parser,
    Source,
    collect_string,
    no_constant,
    text_of_json,
)
from console.api.tools.literals import (
    QUOTES,
    collect_scalar,
    escaped,
    literal_json,
    read_literal,
    read_quoted,
    scalar_json,
)

_KEY = re.compile(r"[^<>\n]+")
_QUOTED_KEY = re.compile(r'[^<>"\n]+')


class _Arguments:
    """The arguments of one call, emitted as an object. properties: their schemas by name."""

    def __init__(self, sink: Schemas, name: str) -> None:
        self._sink = sink
        self._separator = "{"
        properties = sink.schema(name).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    def begin(self, key: str) -> set[str]:
        """Emit a key; return the types that its value may have, an empty set for any."""
        self._sink.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        schema = self._properties.get(key)
        return types_of(schema) if isinstance(schema, Mapping) else set()

    def end(self) -> None:
        """Emit the end of the object."""
        self._sink.arguments("{}" if self._separator == "{" else "}")


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Elements with the name in the opening tag, and one element in each per parameter, in a section or not.

    call, parameter: what comes before the name, and the closing tag.  quoted: True for names in quotes.
    typed: True for an attribute string="true" or "false" of parameters.  several: True for all calls in one section.
    line: text before and after each value.  control: parts of the tags that may be control tokens.
    """

    section: tuple[str, str] = ("<tool_call>", "</tool_call>")
    call: tuple[str, str] = ("<function=", "</function>")
    parameter: tuple[str, str] = ("<parameter=", "</parameter>")
    quoted: bool = False
    typed: bool = False
    several: bool = False
    line: str = ""
    control: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.section[0], self.call[0])

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.section, *self.control)

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        if opening == self.section[0]:
            yield from source.skip_space()
            yield from source.expect(self.call[0])
        while True:
            yield from self._read_one(source, sink)
            if not (yield from source.skip_space()) or not (yield from source.accept_closing(self.call[0])):
                break
        yield from source.accept_closing(self.section[1])

    def _read_one(self, source: Source, sink: Schemas) -> Parser[None]:
        name = yield from name_before(source, '">' if self.quoted else ">")
        sink.begin(name)
        arguments = _Arguments(sink, name)
        while (yield from self._next_parameter(source)):
            key = yield from name_before(source, '"' if self.quoted else ">", _QUOTED_KEY if self.quoted else _KEY)
            types = arguments.begin(key)
            if self.quoted:
                types = (yield from self._read_attribute(source)) or types
            yield from self._read_value(source, sink, types)
        arguments.end()
        sink.complete()

    def _next_parameter(self, source: Source) -> Parser[bool]:
        yield from source.skip_space()
        tag = yield from source.accept(self.parameter[0], self.call[1])
        if not tag:
            raise Malformed(f"neither a parameter nor {self.call[1]} follows")
        return tag == self.parameter[0]

    def _read_attribute(self, source: Source) -> Parser[set[str]]:
        """Parse the rest of a parameter's opening tag; return the types that it sets."""
        if self.typed and (attribute := (yield from source.accept(' string="true">', ' string="false">'))):
            return {"string"} if "true" in attribute else {"any"}
        yield from source.expect(">")
        return set()

    def _read_value(self, source: Source, sink: Sink, types: set[str]) -> Parser[None]:
        endings: tuple[str, ...] = (self.parameter[1],)
        if self.line:
            yield from source.accept("\r\n", self.line)
            endings = (f"{self.line}{self.parameter[1]}", *endings)
        yield from read_text_value(source, sink.arguments, endings, types)


@dataclass(frozen=True, slots=True)
class KeyValueCalls:
    """<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>. line: text between tags."""

    line: str = "\n"

    @property
    def openings(self) -> tuple[str, ...]:
        return ("<tool_call>",)

    @property
    def markers(self) -> tuple[str, ...]:
        return ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        name = yield from name_before(source, "")
        yield from source.peek()
        sink.begin(name)
        arguments = _Arguments(sink, name)
        while (yield from self._next_argument(source)):
            pieces: list[str] = []
            if not (yield from source.until(("</arg_key>",), pieces.append)):
                raise Malformed("a parameter has no name")
            types = arguments.begin("".join(pieces).strip())
            yield from source.skip_space()
            yield from source.expect("<arg_value>")
            yield from read_text_value(source, sink.arguments, ("</arg_value>",), types)
        arguments.end()
        sink.complete()

    def _next_argument(self, source: Source) -> Parser[bool]:
        yield from source.skip_space()
        tag = yield from source.accept("<arg_key>", "</tool_call>")
        if not tag:
            raise Malformed("neither an argument nor </tool_call> follows")
        return tag == "<arg_key>"


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """`opening` call:NAME{KEY:VALUE,...} `closing`, where strings stand between two of `quote`."""

    opening: str
    closing: str
    quote: str

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.quote)

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        yield from source.skip_space()
        yield from source.expect("call:")
        name = yield from name_before(source, "")
        yield from source.skip_space()
        yield from source.expect("{")
        sink.begin(name)
        arguments = _Arguments(sink, name)
        is_first = True
        while (yield from _next_of(source, "}", is_first=is_first)):
            types = arguments.begin((yield from self._read_key(source)))
            if types and "string" not in types and (yield from source.accept(self.quote)):
                yield from read_text_value(source, sink.arguments, (self.quote,), types)
            else:
                yield from self._read_value(source, sink.arguments, 1)
            is_first = False
        arguments.end()
        sink.complete()
        if (yield from source.skip_space()):
            yield from source.accept_closing(self.closing)

    def _read_key(self, source: Source) -> Parser[str]:
        pieces: list[str] = []
        if (yield from source.accept(self.quote)):
            yield from source.until((self.quote,), pieces.append)
        elif (yield from source.peek()) == '"':
            pieces.append((yield from collect_string(source)))
        else:
            pieces.append((yield from collect(source, _GEMMA_KEY)).strip())
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        return "".join(pieces)

    def _read_value(self, source: Source, emit: Emit, depth: int) -> Parser[None]:
        if depth > MAX_DEPTH:
            raise Malformed("it is nested too deeply")
        if (yield from source.accept(self.quote)):
            yield from read_text_value(source, emit, (self.quote,), {"string"})
        elif (yield from source.accept("{")):
            yield from self._read_members(source, emit, depth)
        elif (yield from source.accept("[")):
            yield from self._read_items(source, emit, depth)
        elif (yield from source.peek()) == '"':
            emit(json.dumps((yield from collect_string(source)), ensure_ascii=False))
        else:
            emit(_plain_json((yield from collect_scalar(source, _GEMMA_SCALAR)).strip()))

    def _read_members(self, source: Source, emit: Emit, depth: int) -> Parser[None]:
        separator = "{"
        while (yield from _next_of(source, "}", is_first=separator == "{")):
            key = yield from self._read_key(source)
            emit(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._read_value(source, emit, depth + 1)
            separator = ", "
        emit("{}" if separator == "{" else "}")

    def _read_items(self, source: Source, emit: Emit, depth: int) -> Parser[None]:
        separator = "["
        while (yield from _next_of(source, "]", is_first=separator == "[")):
            emit(separator)
            yield from self._read_value(source, emit, depth + 1)
            separator = ", "
        emit("[]" if separator == "[" else "]")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls as in Python, NAME(KEY=VALUE, ...), in brackets or one a line, between `opening` and `closing`."""

    opening: str = ""
    closing: str = ""
    brackets: bool = True

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening,)))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing)))

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        yield from source.skip_space()
        has_bracket = bool((yield from source.accept("[")))
        while True:
            yield from self._read_one(source, sink)
            if not (yield from source.skip_space()):
                return
            if (yield from source.accept(",", ";")):
                yield from source.skip_space()
            if not (yield from source.more()) or not _NAME_START.match((yield from source.peek())):
                break
        if has_bracket:
            yield from source.accept_closing("]")
        if self.closing and (yield from source.skip_space()):
            yield from source.accept_closing(self.closing)

    def _read_one(self, source: Source, sink: Schemas) -> Parser[None]:
        name = yield from name_before(source, "(")
        sink.begin(name)
        arguments = _Arguments(sink, name)
        is_first = True
        while (yield from _next_of(source, ")", is_first=is_first)):
            key = yield from name_before(source, "", _PYTHON_KEY)
            yield from source.skip_space()
            yield from source.expect("=")
            types = arguments.begin(key)
            yield from source.skip_space()
            if types and "string" not in types and (yield from source.peek()) in QUOTES:
                pieces: list[str] = []
                yield from read_quoted(source, pieces.append)
                sink.arguments(typed_json(text_of_json("".join(pieces)), types))
            else:
                yield from read_literal(source, sink.arguments)
            is_first = False
        arguments.end()
        sink.complete()


_GEMMA_KEY = re.compile(r'[^:{}\[\]",]+')
_GEMMA_SCALAR = re.compile(r"[^,{}\[\]<>]+")
_NAME_START = re.compile(r"[A-Za-z_]")
_PYTHON_KEY = re.compile(r"[^\s=,()\[\]{}'\"]+")


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows for a value, its alternatives included."""
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(map(str, named)) if isinstance(named, list) else set()
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else ():
            types |= types_of(one) if isinstance(one, Mapping) else set()
    return types or _types_of_choices(schema)


def _types_of_choices(schema: Mapping[str, Any]) -> set[str]:
    """Return {"string"} for a schema without a type whose choices are all strings."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    are_texts = isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)
    return {"string"} if are_texts else set()


def read_text_value(source: Source, emit: Emit, endings: tuple[str, ...], types: set[str]) -> Parser[None]:
    """Parse a value up to one of `endings`. A string is emitted as it arrives. Raises Malformed where it has no end."""
    if types == {"string"}:
        emit('"')
        ended = yield from source.until(endings, lambda text: emit(escaped(text)), partial=True)
        ending = '"'
    else:
        pieces: list[str] = []
        ended = yield from source.until(endings, pieces.append)
        ending = typed_json("".join(pieces), types)
    if not ended:
        raise Malformed("a parameter has no end")
    emit(ending)


def typed_json(text: str, types: set[str]) -> str:
    """Return the text as JSON: its value, or a string. Accepts Python's literals, which models and templates write.

    types: allowed types, an empty set for any; if a string is allowed, it is one, unless it is null.
    """
    stripped = text.strip()
    if "string" in types:
        is_null = "null" in types and stripped in ("null", "None")
        return "null" if is_null else json.dumps(text, ensure_ascii=False)
    try:
        json.loads(stripped, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return literal_json(stripped) or json.dumps(text, ensure_ascii=False)
    return stripped


def _plain_json(text: str) -> str:
    """Return a value without quotes as JSON: a number, a constant, or else a string. Raises Malformed for nothing."""
    if not text:
        raise Malformed("a value is missing")
    try:
        return scalar_json(text)
    except Malformed:
        return json.dumps(text, ensure_ascii=False)


def _next_of(source: Source, closing: str, *, is_first: bool) -> Parser[bool]:
    """Consume what separates two members, or `closing`; return whether a member follows."""
    yield from source.skip_space()
    if not is_first and not (yield from source.accept(",")):
        yield from source.expect(closing)
        return False
    yield from source.skip_space()
    return not (yield from source.accept(closing))
