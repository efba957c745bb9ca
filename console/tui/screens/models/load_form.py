"""What a form of a load's own settings shows, and how its values are stepped and typed. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.link.protocol import LoadSettings
from engine.models.catalog import ModelEntry

FieldName = Literal["num_workers", "max_prompts", "max_model_len", "cache_bits", "weights", "dtype"]
Value = int | str

MAX_WORKERS, MAX_PROMPTS, MAX_CONTEXT = 64, 4096, 10_000_000
_LEAST_CONTEXT = 256
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_WEIGHTS = ("auto", "int8", "int4")
_OF_TORCH = ("weights", "dtype")


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the form. max_number: the largest number that can be, 0 for what is chosen from a few."""

    name: FieldName
    title: str
    max_number: int = 0


_FIELDS = (
    Field("num_workers", "workers", MAX_WORKERS),
    Field("max_prompts", "max prompts", MAX_PROMPTS),
    Field("max_model_len", "context", MAX_CONTEXT),
    Field("cache_bits", "KV bits"),
    Field("weights", "weights"),
    Field("dtype", "dtype"),
)


@dataclass(frozen=True, slots=True)
class LoadForm:
    """own: what the load sets itself; defaults: what holds where it does not (ModelsLink.defaults)."""

    entry: ModelEntry
    own: LoadSettings
    defaults: LoadSettings

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those that mean something to the model's backend."""
        return tuple(field for field in _FIELDS if field.name not in _OF_TORCH or self.entry.backend == "torch")

    def is_own(self, name: FieldName) -> bool:
        """Whether the load sets it itself."""
        return getattr(self.own, name) is not None

    def value(self, name: FieldName) -> Value:
        """What the load would have; 0 for a context that nobody knows yet."""
        own = getattr(self.own, name)
        value: Value | None = getattr(self.defaults, name) if own is None else own
        if name == "max_model_len" and value is None:
            return self.entry.context_tokens
        if value is None:
            return "auto" if name in _OF_TORCH else 0
        return value

    def origin(self, name: FieldName) -> str:
        """Where a value comes from, in a word or two."""
        if self.is_own(name):
            return "own"
        if name in ("num_workers", "max_prompts"):
            return "the knob"
        if name == "max_model_len" and self.defaults.max_model_len is None:
            return "the model's"
        return "as set"

    def stepped(self, name: FieldName, by: int) -> LoadForm:
        """The next value up or down; the last one stays."""
        choices, value = self._choices(name), self.value(name)
        if isinstance(value, str) or name == "cache_bits":
            at = list(choices).index(value) if value in choices else 0
            return self._with(name, choices[min(max(0, at + by), len(choices) - 1)])
        numbers = [int(choice) for choice in choices]
        at = bisect_right(numbers, value) if by > 0 else bisect_left(numbers, value) - 1
        return self._with(name, numbers[at]) if 0 <= at < len(numbers) else self

    def typed(self, name: FieldName, number: int) -> LoadForm:
        """A number as it was typed, in range or not; one that is no choice changes nothing."""
        if self._max_number(name) or number in self._choices(name):
            return self._with(name, number)
        return self

    def out_of_range(self, name: FieldName) -> str:
        """The range of a number that is outside of it, as "1 to 64"; "" where nothing is wrong."""
        value, max_number = self.value(name), self._max_number(name)
        if not self.is_own(name) or not isinstance(value, int) or not max_number or 1 <= value <= max_number:
            return ""
        return f"1 to {max_number:,}"

    def cleared(self, name: FieldName) -> LoadForm:
        """Without a value of its own."""
        return self._with(name, None)

    def _max_number(self, name: FieldName) -> int:
        return next(field.max_number for field in self.fields if field.name == name)

    def _with(self, name: FieldName, value: Value | None) -> LoadForm:
        own = msgspec.structs.replace(self.own, **{name: value})
        return LoadForm(self.entry, own, self.defaults)

    def _choices(self, name: FieldName) -> Sequence[Value]:
        match name:
            case "num_workers":
                return range(1, MAX_WORKERS + 1)
            case "max_prompts":
                return _rungs(1, MAX_PROMPTS)
            case "max_model_len":
                whole = self.entry.context_tokens or MAX_CONTEXT
                return sorted({*(rung for rung in _rungs(_LEAST_CONTEXT, whole)), whole})
            case "cache_bits":
                return (4, 6, 8, 16) if self.entry.backend == "exllamav2" else (4, 8, 16)
            case "weights":
                return _WEIGHTS
            case "dtype":
                return _DTYPES


def _rungs(least: int, most: int) -> list[int]:
    """Doublings from `least` on and what lies half way between two: 1, 2, 3, 4, 6, 8, 12 ..."""
    rungs, power = {least}, least
    while power < most:
        rungs |= {power, power + power // 2, 2 * power}
        power *= 2
    return sorted(rung for rung in rungs if least <= rung <= most)
