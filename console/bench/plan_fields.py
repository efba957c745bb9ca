"""The fields of a bench's plan as flags, as a form, and read from text: all from the annotations of the plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import UNSET, Meta

from console.bench.kinds.base import Plan
from console.link.benches import BenchField, BenchForm
from engine.errors import InvalidRequest
from engine.simulation.lengths import TRACE, Length

_TRACED = ("prompt_tokens", "output_tokens")
"""Fields that may be those of a trace."""


def add_flags(parser: argparse._ArgumentGroup, plan: type[Plan]) -> None:
    """Add a flag for each field; a wrong value ends the program with one sentence."""
    defaults = plan()
    for name, field in _fields(plan).items():
        default = _text(getattr(defaults, name))
        names = (name, plan.synonyms[name]) if name in plan.synonyms else (name,)
        parser.add_argument(
            *(f"--{each.replace('_', '-')}" for each in names),
            dest=name,
            type=field.read_flag,
            default=argparse.SUPPRESS,
            metavar=field.metavar,
            help=f"{field.meta.description}{f' (default {default})' if default else ''}".replace("%", "%%"),
        )


def plan_of(plan: type[Plan], given: dict[str, Any], *, quick: bool) -> Plan:
    """The plan with the given fields. quick: the others for fewer and shorter requests."""
    changes = {**(plan.quick if quick else {}), **plan.implied(given)}
    return plan(**changes | {name: given[name] for name in plan.__struct_fields__ if name in given})


def plan_from(plan: type[Plan], texts: Mapping[str, str], *, quick: bool) -> Plan:
    """The plan with fields as texts, as on the command line. Raises InvalidRequest, its param the field."""
    fields = _fields(plan)
    given = {}
    for name, text in texts.items():
        if name not in fields:
            raise InvalidRequest(f"bench {plan.name} has no {name}", param=name)
        try:
            given[name] = fields[name].read(text.strip())
        except InvalidRequest as error:
            raise InvalidRequest(f"{fields[name].title_of(name)}: {error.message}", param=name) from error
    return plan_of(plan, given, quick=quick)


def form_of(plan: type[Plan]) -> BenchForm:
    """The form of a bench: the fields that a console offers."""
    fields, full, quick = _fields(plan), plan(), plan(**plan.quick)
    return BenchForm(
        bench=plan.name,
        measures=plan.sentence(),
        fields=tuple(
            BenchField(
                name=name,
                title=fields[name].title_of(name),
                hint=fields[name].meta.description or "",
                quick=_text(getattr(quick, name)),
                full=_text(getattr(full, name)),
                traced=str(TRACE) if fields[name].traced and name in _TRACED else "",
            )
            for name in plan.form
        ),
        refused=f"{plan.no_serving}." if plan.no_serving else "",
        no_server=f"{plan.no_server}." if plan.no_server else "",
    )


def _text(value: object) -> str:
    """A value as its flag takes it."""
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return "" if value is None or value is UNSET else str(value)


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a plan. kind: its type.  traced: whether the plan may take lengths from a trace."""

    kind: Any
    meta: Meta
    traced: bool

    def title_of(self, name: str) -> str:
        """Return what forms, and errors about them, call the field of that name."""
        return self.meta.title or name.replace("_", " ")

    def read(self, text: str) -> Any:
        """Return the value of a text. Raises InvalidRequest."""
        kind = self.kind
        if kind is str:
            return text
        if kind is Length:
            return Length.parse(text, traced=self.traced)
        number = _number_of(kind)
        if get_origin(kind) is tuple:
            return tuple(_bounded(number(part), self.meta, part) for part in text.split(","))
        if not text and type(None) in get_args(kind):
            return None
        return _bounded(number(text), self.meta, text)

    def read_flag(self, text: str) -> Any:
        """As `read`, with the error that argparse expects."""
        try:
            return self.read(text)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(error.message) from error

    @property
    def metavar(self) -> str:
        """Stands for the value in the help."""
        if get_origin(self.kind) is tuple:
            return "N,..."
        if type(None) in get_args(self.kind):
            return "TIME"
        return {Length: "TOKENS", str: "FILE"}.get(self.kind, "N")


def _fields(plan: type[Plan]) -> dict[str, _Field]:
    hints, traced = get_type_hints(plan, include_extras=True), "trace" in plan.__struct_fields__
    return {
        name: _Field(get_args(hint)[0], next(each for each in get_args(hint)[1:] if isinstance(each, Meta)), traced)
        for name, hint in hints.items()
        if name in plan.__struct_fields__
    }


def _number_of(kind: Any) -> Callable[[str], float]:
    """int for int and tuple[int, ...]; seconds for what may be None; else float."""
    kinds = get_args(kind)
    if kind is int or kinds[:1] == (int,):
        return _integer
    return _seconds if type(None) in kinds else _real


def _integer(text: str) -> int:
    if not text.strip().removeprefix("-").isdecimal() or len(text) > 20:
        raise InvalidRequest(f"{text or 'an empty value'} is not a whole number")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InvalidRequest(f"{text or 'an empty value'} is not a number")
    return value


def _seconds(text: str) -> float:
    """From "500ms", "0.5s" or "0.5"."""
    plain, factor = (text[:-2], 0.001) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = factor * float(plain)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{text or 'an empty value'} is not a duration such as 500ms or 0.5s")
    return seconds


def _bounded(value: float, meta: Meta, text: str) -> float:
    least, above, most = meta.ge, meta.gt, meta.le
    if (least is not None and value < least) or (most is not None and value > most):
        raise InvalidRequest(f"{text} is not between {least if least is not None else above} and {most}")
    if above is not None and value <= above:
        raise InvalidRequest(f"{text} is not more than {above}")
    return value
