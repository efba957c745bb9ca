"""Parsers of the shapes in which models write calls. Formats differ by shape and markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from console.api.tools.json_stream import (
    Emit,
    Malformed,
    Parser,
    Source,
    collect_string,
    no_constant,
    read_space,
    read_value,
)

# A call as a JSON object: {"name": ..., "arguments": {...}}, in any order, with the keys that models use.

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class Sink(Protocol):
    """Receives calls as they are parsed."""

    def begin(self, name: str) -> None:
        """Begin a call of `name`. Raises Malformed where it cannot be one."""

    def member(self, key: str) -> None:
        """Receive another member's key. Raises Malformed where a call cannot have it."""

    def arguments(self, text: str) -> None:
        """Receive more of its arguments."""

    def complete(self) -> None:
        """End the call."""


def read_call(source: Source, sink: Sink) -> Parser[None]:
    """Parse one call, from its { to its }. Raises Malformed."""
    call = _Call(sink)
    yield from _read_members(source, call)
    call.finish()


def read_arguments(source: Source, emit: Emit) -> Parser[None]:
    """Parse a call's arguments: an object, emitted as it is read; one in a string, as some models write it; or null.

    Raises Malformed.
    """
    match (yield from source.peek()):
        case "{":
            yield from read_value(source, emit)
        case '"':
            emit(_object_in((yield from collect_string(source))))
        case _:
            yield from source.expect("null")
            emit("{}")


class _Call:
    """A call with members in any order: arguments wait for the name."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._name: str | None = None
        self._pending: list[str] = []
        self._has_arguments = False

    def take_name(self, name: str) -> None:
        if self._name is not None:
            raise Malformed("it has two names")
        self._name = name
        self._sink.begin(name)
        for text in self._pending:
            self._sink.arguments(text)

    def take_other(self, key: str) -> None:
        self._sink.member(key)

    def begin_arguments(self) -> Emit:
        if self._has_arguments:
            raise Malformed("it has arguments twice")
        self._has_arguments = True
        return self._pending.append if self._name is None else self._sink.arguments

    def finish(self) -> None:
        if self._name is None:
            raise Malformed("it has no name")
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._sink.complete()


def _read_members(source: Source, call: _Call) -> Parser[None]:
    yield from source.expect("{")
    if (yield from read_space(source, _ignore)) == "}":
        source.take()
        return
    while True:
        yield from read_space(source, _ignore)
        key = yield from collect_string(source)
        yield from read_space(source, _ignore)
        yield from source.expect(":")
        yield from read_space(source, _ignore)
        yield from _read_member(source, call, key)
        if (yield from read_space(source, _ignore)) == "}":
            source.take()
            return
        yield from source.expect(",")


def _read_member(source: Source, call: _Call, key: str) -> Parser[None]:
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
        yield from read_value(source, _ignore)


def _object_in(text: str) -> str:
    try:
        value = json.loads(text, parse_constant=no_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Malformed("its arguments are not a JSON object")
    return text if text.strip() else "{}"


def _ignore(text: str) -> None:
    """Ignore white space and members that are not part of a call, such as an id."""


class Schemas(Sink, Protocol):
    """A sink that knows the schemas of the tools."""

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool's arguments; {} for an unknown tool."""

    def separate(self) -> None:
        """Separate the text before from the text that follows."""


class Shape(Protocol):
    """A way to write calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Markers that begin calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts besides names and arguments; the tokenizer may have control tokens for them."""

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        """Parse the calls after `opening`, one of `openings`. Raises Malformed."""


NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
"""Characters of tools' names."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Objects between `opening` and `closing`: one, several, or an array. The closing may be missing.

    array: True if the model writes an array even for one.  name, arguments: keys that it writes; NAME_KEYS and
    ARGUMENT_KEYS are all read.
    """

    opening: str
    closing: str = ""
    array: bool = False
    name: str = "name"
    arguments: str = "arguments"

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening,)))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing)))

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        yield from source.skip_space()
        if (yield from source.accept("[")):
            yield from _read_array(source, sink)
        else:
            yield from _read_objects(source, sink)
        if (yield from source.skip_space()) and self.closing:
            yield from source.accept_closing(self.closing)


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`opening` name `separator` {arguments} `closing`, repeated, inside `section` if there is one.

    kind: prefix of the name.  fenced: True for arguments in a Markdown block.  numbered: True for "functions.NAME:0".
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

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        if opening == self.section[0]:
            yield from source.skip_space()
            yield from source.expect(self.opening)
        while True:
            yield from self._read_one(source, sink)
            if not (yield from source.skip_space()) or not (yield from source.accept_closing(self.opening)):
                break
        if self.section[1]:
            yield from source.accept_closing(self.section[1])

    def _read_one(self, source: Source, sink: Schemas) -> Parser[None]:
        if self.kind:
            yield from source.expect(self.kind)
        sink.begin(self._name((yield from name_before(source, self.separator))))
        if self.fenced:
            yield from source.skip_space()
            yield from source.accept("```json")
        yield from source.skip_space()
        yield from read_arguments(source, sink.arguments)
        sink.complete()
        yield from source.skip_space()
        if self.fenced and (yield from source.accept_closing("```")):
            yield from source.skip_space()
        if self.closing:
            yield from source.accept_closing(self.closing)

    def _name(self, text: str) -> str:
        return text.removeprefix("functions.").rpartition(":")[0] or text if self.numbered else text


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """[TOOL_CALLS] and an array of objects; or, by newer models (named), [TOOL_CALLS]name[ARGS]{arguments} per call.
    Both are read."""

    named: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]",)

    @property
    def markers(self) -> tuple[str, ...]:
        return ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        yield from source.skip_space()
        if (yield from source.accept("[")):
            yield from _read_array(source, sink)
        elif (yield from source.peek()) == "{":
            yield from _read_objects(source, sink)
        else:
            yield from self._read_named(source, sink)

    def _read_named(self, source: Source, sink: Schemas) -> Parser[None]:
        name = yield from collect(source, NAME)
        if (yield from source.accept("[CALL_ID]")):
            yield from collect(source, NAME)
        yield from source.accept("[ARGS]")
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Malformed("its arguments are missing")
        sink.begin(name)
        yield from read_arguments(source, sink.arguments)
        sink.complete()


@dataclass(frozen=True, slots=True)
class KeyedCalls:
    """An array of objects whose only key is the name, {"NAME": {arguments}}, between `opening` and `closing`."""

    opening: str
    closing: str

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def read(self, source: Source, sink: Schemas, opening: str) -> Parser[None]:
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from source.skip_space()
            yield from source.expect("{")
            yield from source.skip_space()
            name = yield from collect_string(source)
            yield from source.skip_space()
            yield from source.expect(":")
            sink.begin(name)
            yield from source.skip_space()
            yield from read_arguments(source, sink.arguments)
            yield from source.skip_space()
            yield from source.expect("}")
            sink.complete()
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("]")
        if (yield from source.skip_space()):
            yield from source.accept_closing(self.closing)


def name_before(source: Source, separator: str, pattern: re.Pattern[str] = NAME) -> Parser[str]:
    """Parse a name, and the separator after it, if any."""
    yield from source.skip_space()
    name = yield from collect(source, pattern)
    if separator:
        yield from source.expect(separator)
    return name


def collect(source: Source, pattern: re.Pattern[str]) -> Parser[str]:
    """Collect all that `pattern` matches. Raises Malformed for nothing."""
    text = ""
    while (yield from source.more()) and (more := source.take_all(pattern)):
        text += more
    if not text:
        raise Malformed("its name is missing")
    return text


def _read_array(source: Source, sink: Sink) -> Parser[None]:
    """Parse the objects of an array, after its [."""
    while True:
        yield from source.skip_space()
        yield from read_call(source, sink)
        yield from source.skip_space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("]")


def _read_objects(source: Source, sink: Sink, separators: tuple[str, ...] = (";", ",")) -> Parser[None]:
    """Parse consecutive objects, separated by white space or a separator."""
    while True:
        yield from read_call(source, sink)
        if not (yield from source.skip_space()):
            return
        if (yield from source.accept(*separators)):
            yield from source.skip_space()
        if not (yield from source.more()) or (yield from source.peek()) != "{":
            return
