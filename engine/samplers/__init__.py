"""Sampling parameters as rows, and samplers: one file of this folder each, found by itself.

A row says everything about a parameter in one place: its range, its names in requests, its label in the chat's form,
its line in the documentation, and the backends that lack it. A sampler's file says what its parameters do to logits or
probabilities. It never imports torch when it is loaded: requests and forms read its rows in processes without torch.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

Stage = Literal["logits", "distances", "probabilities"]

TINY = math.ulp(0.0)
"""The lowest value of what must be more than 0."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The row of a sampling parameter.

    meaning: a phrase for the documentation.  low, high: the range of a number, both ends included.
    name, neutral: its name and the value that changes nothing; for a field of SamplingParams both are there already.
    label: its name in the chat's form; "" leaves it out of there.
    http_name: its name in HTTP requests where that is another.  aliases: more names that clients have for it.
    sent_low: the lowest value that clients may send, which means the same as `low`.
    part_of: the parameter without which it has no effect.  lacking: backend -> why it does not support it.
    """

    meaning: str
    low: float | None = None
    high: float | None = None
    _: KW_ONLY
    name: str = ""
    neutral: Any = None
    label: str = ""
    http_name: str = ""
    aliases: tuple[str, ...] = ()
    sent_low: int | None = None
    part_of: str = ""
    lacking: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """A sampler, which its file exports as SAMPLER.

    parameters: rows of its own, or names of fields of SamplingParams. It runs for requests in which the first one is
    not neutral; the others cost nothing.
    apply: takes the values and one [rows, 1] column for each parameter, and returns new values of the same shape. Each
    row is its own: the result never depends on the others.
    on: the values, in the order in which they come about.
        "logits" [rows, vocab]: minus infinity where excluded.
        "distances" [rows, tokens]: logits less the best one, which is 0. It works on each by itself and keeps their
        order, so that it is spared for tokens that cannot be drawn.
        "probabilities" [rows, tokens]: best first, 0 where excluded, after temperature, top_k, top_p, top_a and min_p;
        they need not add up to 1.
    """

    parameters: tuple[Parameter | str, ...]
    apply: Callable[..., Any]
    on: Stage = "logits"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return tuple(row if isinstance(row, str) else row.name for row in self.parameters)

    @property
    def rows(self) -> tuple[Parameter, ...]:
        """Rows of its own."""
        return tuple(row for row in self.parameters if isinstance(row, Parameter))


@cache
def samplers() -> tuple[Sampler, ...]:
    """Every sampler, in the order in which they apply, which is that of the names of their files."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)})
    return tuple(import_module(f"{__name__}.{name}").SAMPLER for name in names)


def added_parameters() -> tuple[Parameter, ...]:
    """Rows that samplers bring along besides the fields of SamplingParams."""
    return tuple(row for sampler in samplers() for row in sampler.rows)


def with_fields(struct: type[T], fields: Iterable[tuple[str, Any, Any]]) -> type[T]:
    """The struct with more fields, each a name, a type and a default; itself where there are none."""
    fields = list(fields)
    if not fields:
        return struct
    extended = msgspec.defstruct(
        struct.__name__,
        fields,
        bases=(struct,),
        module=struct.__module__,
        namespace={"__doc__": struct.__doc__},
        frozen=True,
        kw_only=True,
    )
    return cast("type[T]", extended)
