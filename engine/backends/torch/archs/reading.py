"""Values out of config.json, checked. No torch here."""

from __future__ import annotations

from engine.backends.torch.archs.base import RawConfig
from engine.errors import UnsupportedModel


def positive(raw: RawConfig, key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises UnsupportedModel for anything else, or where it is missing."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a whole number of at least 1")
    return value


def number(raw: RawConfig, key: str, default: float) -> float:
    """A number, `default` where there is none. Raises UnsupportedModel for anything else."""
    value = optional_number(raw, key)
    return default if value is None else value


def optional_number(raw: RawConfig, key: str) -> float | None:
    """A number, None where there is none. Raises UnsupportedModel for anything else."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a number")
    return float(value)


def numbers(raw: RawConfig, key: str) -> tuple[float, ...]:
    """A list of numbers. Raises UnsupportedModel for anything else, or where it is missing."""
    value = raw.get(key)
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a list of numbers")
    return tuple(map(float, value))
