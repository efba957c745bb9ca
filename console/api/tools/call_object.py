"""A call written as a JSON object: {"name": ..., "arguments": {...}}, in any order, under the names that models use."""

from __future__ import annotations

import json
from typing import Protocol

from console.api.tools.json_text import collect_string, no_constant, read_space, read_value
from console.api.tools.source import Give, Malformed, Reading, Source

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
