"""Structured output: the engine's Grammar from the forms that clients send.

Every function here refuses what nothing can be held to, naming the client's field. That is a fraction of a second's
work at worst, and nothing for a grammar that was seen lately.
"""

from __future__ import annotations

import json
from functools import lru_cache

from pydantic_core import from_json

from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text import grammar as grammars

MAX_SCHEMA_BYTES = 65_536
"""Longest schema, regular expression or grammar, where no setting says otherwise."""

MAX_CHOICES = 1000
_CHECKED_KEPT = 256
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def json_grammar(schema: object, param: str, *, lenient: bool = False, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """One JSON value that a JSON schema describes, itself an object or JSON text (`true` is any value).

    lenient: keywords that answers cannot be held to are left aside, where they are refused otherwise.
    Raises InvalidRequest naming `param`.
    """
    if isinstance(schema, str):
        Grammar(kind="json_schema", source=schema, param=param).refuse_longer(max_bytes)
        try:
            schema = from_json(schema, allow_inf_nan=False)
        except ValueError:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} should be a JSON schema that something satisfies: an object", param=param)
    if "x-guidance" in schema:
        raise InvalidRequest(f"{param}.x-guidance is no keyword that clients can set", param=param)
    schema = schema | {"x-guidance": {"lenient": True}} if lenient else schema
    return _checked(Grammar(kind="json_schema", source=_json(schema, param, max_bytes), param=param), max_bytes)


def json_object_grammar(param: str = "response_format") -> Grammar:
    """Any JSON object."""
    return Grammar(kind="json_object", param=param)


def regex_grammar(text: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """A text that a regular expression matches from its start to its end. Raises InvalidRequest naming `param`."""
    return _checked(Grammar(kind="regex", source=_text(text, param), param=param), max_bytes)


def choice_grammar(choices: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """One of several strings. Raises InvalidRequest naming `param`."""
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(each, str) for each in choices):
        raise InvalidRequest(f"{param} should be an array of strings", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{param} has {len(choices)} strings; the max is {MAX_CHOICES}", param=param)
    source = _json(choices, param, max_bytes)
    return _checked(Grammar(kind="choice", source=source, param=param), max_bytes)


def lark_grammar(text: object, param: str, *, max_bytes: int = MAX_SCHEMA_BYTES) -> Grammar:
    """A text that a context-free grammar describes, written as Lark has it or as GBNF (`root ::= ...`).

    Raises InvalidRequest naming `param`.
    """
    return _checked(Grammar(kind="lark", source=_text(text, param), param=param), max_bytes)


def _json(value: object, param: str, max_bytes: int) -> str:
    """Return the value as JSON. Raises InvalidRequest as soon as that is too long, or where it is nested too deeply."""
    pieces: list[str] = []
    room = max_bytes
    try:
        for piece in _ENCODER.iterencode(value):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise InvalidRequest(f"{param} has more than {max_bytes:,} bytes", param=param, limit=max_bytes)
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
    return "".join(pieces)


def _checked(grammar: Grammar, max_bytes: int) -> Grammar:
    grammar.refuse_longer(max_bytes)
    _check(grammar)
    return grammar


@lru_cache(_CHECKED_KEPT)
def _check(grammar: Grammar) -> None:
    """Check a grammar once for all requests that use it; one that is refused is checked each time."""
    grammars.check(grammar)


def _text(text: object, param: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{param} should be a string, not an empty one", param=param)
    return text
