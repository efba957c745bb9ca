"""Values out of a model's config, checked: anybody may have written them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from engine.config import quote_value
from engine.errors import UnsupportedModel

MAX_LAYERS = 10_000
"""Layers of a model, and experts of a layer. The largest models have hundreds; each is planned on its own."""

MAX_SIZE = 2**24
"""Elements of a dimension, a vocabulary's among them. The largest vocabularies have a quarter of a million."""

MAX_TOKENS = 2**31 - 1
"""Tokens of a context or a window, scaled or not: what a 32-bit position reaches. Llama 4 Scout has ten million."""

MAX_NUMBER = 1e12
"""Of any other number: factors, bases and scales, whose products are to stay numbers."""


SOURCE = "<source>"
"""Key of a config's ConfigSource. It stays with the config where that is merged with others."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The file that a config was read from, and what that calls a value where it is not config.json's name for it."""

    file: str = "config.json"
    fields: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, key: str) -> str:
        """Return the file's own name for a value."""
        return self.fields.get(key, key)


_CONFIG_JSON = ConfigSource()


def source_of(raw: Mapping[str, object]) -> ConfigSource:
    """Return the source of a config, for refusals in its own words. config.json's says nothing of it."""
    source = raw.get(SOURCE)
    return source if isinstance(source, ConfigSource) else _CONFIG_JSON


def refusal(raw: Mapping[str, object], key: str, value: object, why: str) -> UnsupportedModel:
    """Return the refusal of a value of a config, by the names of its source. why: as a clause."""
    source = source_of(raw)
    return UnsupportedModel(f"{source.file} has {source.name_of(key)} = {quote_value(value)}; {why}")


def positive(raw: Mapping[str, object], key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    """A whole number from 1 to `most`. Raises UnsupportedModel for anything else, or where it is missing."""
    value = raw.get(key)
    if value is None:
        value = default
    source = source_of(raw)
    if value is None:
        raise UnsupportedModel(f"{source.file} lacks {source.name_of(key)}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(raw, key, value, "it must be a whole number of at least 1")
    refuse_more(source.name_of(key), value, most, source.file)
    return value


def refuse_more(name: str, value: float, most: int, file: str = _CONFIG_JSON.file) -> None:
    """Raise UnsupportedModel for a value of a config beyond what is supported."""
    if value > most:
        raise UnsupportedModel(
            f"{file} has {name} = {quote_value(value)}; more than {most} are not supported", param=name, limit=most
        )


def window(raw: Mapping[str, object], default: int | None = None) -> int | None:
    """`sliding_window` in tokens, None where that is not a whole number. Raises UnsupportedModel for one below 1 or
    beyond MAX_TOKENS."""
    value = raw.get("sliding_window", default)
    return positive(raw, "sliding_window", default, most=MAX_TOKENS) if isinstance(value, int) else None


def number(raw: Mapping[str, object], key: str, default: float) -> float:
    """A number, `default` where there is none. Raises UnsupportedModel for anything else."""
    value = optional_number(raw, key)
    return default if value is None else value


def positive_number(raw: Mapping[str, object], key: str, default: float) -> float:
    """A number above 0, `default` where there is none. Raises UnsupportedModel for anything else."""
    value = number(raw, key, default)
    if value < 1 / MAX_NUMBER:
        raise refusal(raw, key, value, "it must be more than 0")
    return value


def optional_number(raw: Mapping[str, object], key: str) -> float | None:
    """A number, None where there is none. Raises UnsupportedModel for anything else."""
    value = raw.get(key)
    if value is None:
        return None
    if not _is_number(value):
        raise refusal(raw, key, value, f"it must be a number up to {MAX_NUMBER:g}")
    return float(value)


def numbers(raw: Mapping[str, object], key: str) -> tuple[float, ...]:
    """A list of numbers. Raises UnsupportedModel for anything else, or where it is missing."""
    value = raw.get(key)
    if not isinstance(value, list) or not all(map(_is_number, value)):
        raise refusal(raw, key, value, "it must be a list of numbers")
    return tuple(map(float, value))


def _is_number(value: object) -> TypeGuard[int | float]:
    """Return whether it is a number of usable size. A whole one may be beyond any float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
