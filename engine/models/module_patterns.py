"""Which of an adapter's patterns a module's name matches: PEFT's `rank_pattern` and `alpha_pattern`, in linear time.

PEFT takes each for a regular expression of Python, which can take time with the power of a name's length, and matches
it against the end of a name from a dot on. Most patterns are names, or ends of names, and are looked up. Any other is
matched by Rust's regex engine, which knows no expression that it would take long for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from engine.config import quoted
from engine.errors import UnsupportedModel

MAX_EXPRESSIONS = 64
"""Patterns that are more than a name, in one adapter. Hand-written ones are a handful."""

MAX_CHARACTERS = 1024
"""Of these together: each may take a quarter of a millisecond to compile, and 30 KiB."""

_NAME = re.compile(r"(?P<start>\^?)(?P<name>(?:[\w-]|\\?\.)+)\$?")

Value = TypeVar("Value")


class ModulePatterns(Generic[Value]):
    """Values by pattern; the first pattern that matches a module decides.

    A dot in a pattern that is a name is a dot. Raises UnsupportedModel for a pattern that is no regular expression, one
    with look-around, back references or counted repetitions, and too many of them.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._by_end: dict[str, tuple[int, Value]] = {}
        self._by_name: dict[str, tuple[int, Value]] = {}
        expressions: list[tuple[int, str, Value]] = []
        for position, (pattern, value) in enumerate(values.items()):
            found = _NAME.fullmatch(pattern)
            if found is None:
                expressions.append((position, pattern, value))
            else:
                names = self._by_name if found["start"] else self._by_end
                names.setdefault(found["name"].replace("\\", ""), (position, value))
        characters = sum(len(pattern) for _, pattern, _ in expressions)
        if len(expressions) > MAX_EXPRESSIONS or characters > MAX_CHARACTERS:
            raise UnsupportedModel(
                f"the adapter has {len(expressions)} patterns of {characters} characters that are more than names of "
                f"modules; {MAX_EXPRESSIONS} of {MAX_CHARACTERS} together are supported"
            )
        self._expressions = [(position, _Expression(pattern), value) for position, pattern, value in expressions]

    def value_of(self, module: str, otherwise: Value) -> Value:
        """The value of the first pattern that matches a module's name, `otherwise` where none does."""
        named = [self._by_name[module]] if module in self._by_name else []
        named += [self._by_end[end] for end in _ends(module) if end in self._by_end]
        before, value = min(named, key=lambda found: found[0], default=(None, otherwise))
        for position, expression, its_value in self._expressions:
            if before is not None and position > before:
                break
            if expression.matches(module):
                return its_value
        return value


class _Expression:
    """A regular expression over the end of a name from a dot on."""

    def __init__(self, pattern: str) -> None:
        from pydantic_core import SchemaError, SchemaValidator, core_schema

        if "{" in pattern:
            raise UnsupportedModel(f"the adapter has a pattern with a counted repetition or class: {quoted(pattern)}")
        try:
            re.compile(pattern)  # Rust takes some that Python does not, and PEFT does not either then
            for whole in (pattern, rf"^(?:.*\.)?(?:{pattern})$"):
                schema = core_schema.str_schema(pattern=whole, regex_engine="rust-regex")
                self._validator = SchemaValidator(schema)
        except (SchemaError, re.error, RecursionError, OverflowError):
            raise UnsupportedModel(
                f"the adapter has a pattern that makes no sense, or looks around or back: {quoted(pattern)}"
            ) from None

    def matches(self, name: str) -> bool:
        return self._validator.isinstance_python(name)


def _ends(module: str) -> Iterator[str]:
    """The name, and what is behind each of its dots."""
    yield module
    at = module.find(".")
    while at >= 0:
        yield module[at + 1 :]
        at = module.find(".", at + 1)
