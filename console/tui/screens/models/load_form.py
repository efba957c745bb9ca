"""The form of a load's own options: their values, and how these are stepped and typed. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from console import text
from console.link.settings import Kind
from console.settings.load_options import LoadOptions, load_options, value_type
from console.settings.rows import as_text, choices_of, kind_of
from console.settings.schema import Flag, flag_of
from engine.config import BackendKind
from engine.models.catalog import ModelEntry

Value = int | float | bool | str | tuple[float, ...]

_MAIN = {
    "num_workers": "workers",
    "max_prompts": "max prompts",
    "max_model_len": "context",
    "cache_bits": "KV bits",
    "weights": "weights",
    "dtype": "dtype",
}
"""Options that the form begins with, and their titles; the others have a line where they are set, or all are shown."""
_MIN_CONTEXT = 256
_MAX_VALUE_CELLS = 24


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the form. least, most: bounds of a number.  backends: those that honour it, None for all."""

    name: str
    title: str
    kind: Kind
    least: float = 0
    most: float = 0
    choices: tuple[Value, ...] = ()
    backends: tuple[BackendKind, ...] | None = None
    is_whole: bool = False
    is_knob: bool = False


@cache
def form_fields() -> tuple[Field, ...]:
    """Return a line for each option that a load has, those of most loads first."""
    fields = {name: _field(name, field, flag) for name, field, flag in load_options()}
    return tuple(fields[name] for name in (*_MAIN, *(name for name in fields if name not in _MAIN)))


def _field(name: str, setting: FieldInfo, flag: Flag) -> Field:
    kind = kind_of(setting)
    number = get_origin(value_type(setting)) is None and kind == "number"
    low: Any = next((each.ge for each in setting.metadata if isinstance(each, Ge)), 0)
    high: Any = next((each.le for each in setting.metadata if isinstance(each, Le)), 0)
    choices: tuple[Value, ...] = ()
    if kind == "switch":
        choices = (False, True)
    elif choices_of(setting):
        choices = tuple(sorted(get_args(setting.annotation))) if name == "cache_bits" else get_args(setting.annotation)
    return Field(
        name,
        _MAIN.get(name, name.replace("_", " ")),
        kind,
        low if number else 0,
        high if number else 0,
        choices,
        flag.backends,
        int in (value_type(setting), *get_args(value_type(setting))),
        flag.knob,
    )


@dataclass(frozen=True, slots=True)
class LoadForm:
    """own: what the load sets itself; defaults: what holds where it does not (ModelsLink.defaults).

    shows_all: also the options that few loads set have a line.
    """

    entry: ModelEntry
    own: LoadOptions
    defaults: LoadOptions
    shows_all: bool = False

    @property
    def fields(self) -> tuple[Field, ...]:
        """The lines: options that mean something to the model's backend."""
        return tuple(
            field
            for field in form_fields()
            if (field.backends is None or self.entry.backend in field.backends)
            and (self.shows_all or field.name in _MAIN or self.is_own(field.name))
        )

    def is_own(self, name: str) -> bool:
        """Return whether the load sets it itself."""
        return getattr(self.own, name) is not None

    def value(self, name: str) -> Value | None:
        """Return what the load would have; None where that is the model's own and not known, or nothing."""
        own = getattr(self.own, name)
        value: Value | None = getattr(self.defaults, name) if own is None else own
        if name == "max_model_len" and value is None:
            return self.entry.context_tokens or None
        if name == "max_prompts" and value is None:
            return flag_of(name).gpu if self.entry.backend == "torch" else flag_of(name).gpu_library
        if value is None and self._field(name).kind == "choice":
            return "auto"
        return value

    def value_text(self, name: str) -> str:
        """Return the value as it is shown."""
        value = self.value(name)
        if name in ("dtype", "weights"):
            return text.dtype(str(value))
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else as_text(value)
        return (shown if len(shown) <= _MAX_VALUE_CELLS else f"…{shown[1 - _MAX_VALUE_CELLS :]}") or "–"

    def origin(self, name: str) -> str:
        """Return what a value that is set here replaces; "" for any other value."""
        return f"set here, default {self.without(name).value_text(name)}" if self.is_own(name) else ""

    def with_step(self, name: str, by: int) -> LoadForm:
        """Return the form with the next value up or down; the last one stays, and so does what can only be typed."""
        choices, value = self._choices(name), self.value(name)
        if not choices:
            return self
        if self._field(name).choices:
            at = choices.index(value) if value in choices else 0
            return self._with(name, choices[min(max(0, at + by), len(choices) - 1)])
        numbers = [float(choice) for choice in choices]  # type: ignore[arg-type]
        current = float(value) if isinstance(value, int | float) else numbers[0] - by
        at = bisect_right(numbers, current) if by > 0 else bisect_left(numbers, current) - 1
        return self._with(name, choices[at]) if 0 <= at < len(numbers) else self

    def with_number(self, name: str, number: int) -> LoadForm:
        """Return the form with a number that was typed, in range or not; one that is no choice changes nothing."""
        field = self._field(name)
        if field.kind == "number" or (field.kind == "choice" and number in self._choices(name)):
            return self._with(name, number)
        return self

    def with_text(self, name: str, line: str) -> LoadForm:
        """Return the form with a value that was typed as a flag has it. Raises ValueError where it is none."""
        field = self._field(name)
        if field.choices:
            named = {as_text(choice): choice for choice in self._choices(name)}
            if line not in named:
                raise ValueError(f"one of {', '.join(named)}")
            return self._with(name, named[line])
        if field.kind == "number":
            return self._with(name, _number(line, field))
        if field.kind == "list":
            return self._with(name, tuple(_number(part, field) for part in line.split(",")))
        return self._with(name, line)

    def out_of_range(self, name: str) -> str:
        """Return the range of a number that is outside of it, as "1 to 64"; "" where nothing is wrong."""
        value, field = self.value(name), self._field(name)
        if not self.is_own(name) or field.kind != "number" or not isinstance(value, int | float):
            return ""
        return "" if field.least <= value <= field.most else f"{field.least:,.0f} to {field.most:,.0f}"

    def without(self, name: str) -> LoadForm:
        """Return the form without a value of its own."""
        return self._with(name, None)

    def _field(self, name: str) -> Field:
        return next(field for field in form_fields() if field.name == name)

    def _with(self, name: str, value: Value | None) -> LoadForm:
        return replace(self, own=msgspec.structs.replace(self.own, **{name: value}))

    def _choices(self, name: str) -> Sequence[Value]:
        field = self._field(name)
        if name == "cache_bits" and self.entry.backend == "torch":
            return tuple(bits for bits in field.choices if bits != 6)
        if field.choices or field.kind != "number":
            return field.choices
        if name == "num_workers":
            return range(int(field.least), int(field.most) + 1)
        least, most = int(field.least), int(field.most)
        if name == "max_model_len":
            whole = self.entry.context_tokens or most
            return sorted({*_rungs(_MIN_CONTEXT, whole), whole})
        return sorted({least, *_rungs(max(1, least), most)})


def _rungs(least: int, most: int) -> list[int]:
    """Return doublings from `least` on and what lies half way between two: 1, 2, 3, 4, 6, 8, 12 ..."""
    rungs, power = {least}, least
    while power < most:
        rungs |= {power, power + power // 2, 2 * power}
        power *= 2
    return sorted(rung for rung in rungs if least <= rung <= most)


def _number(text: str, field: Field) -> float:
    """Return a number as it was typed; raises ValueError with what it should be."""
    try:
        return int(text) if field.is_whole else float(text)
    except ValueError:
        raise ValueError("a whole number is needed" if field.is_whole else "a number is needed") from None
