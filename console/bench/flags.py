"""Flags of a bench, made from the fields of its plan: each has one, with the field's description and bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import UNSET, Meta

from console.bench.kinds.base import Plan
from engine.errors import InvalidRequest
from engine.simulation.lengths import Length


def add_flags(parser: argparse._ArgumentGroup, plan: type[Plan]) -> None:
    """Add them; a value that is none ends the program with one sentence."""
    defaults = plan()
    for name, (kind, meta) in _fields(plan).items():
        default = written(getattr(defaults, name))
        names = (name, plan.synonyms[name]) if name in plan.synonyms else (name,)
        parser.add_argument(
            *(f"--{each.replace('_', '-')}" for each in names),
            dest=name,
            type=_reader(kind, meta, traced=_traced(plan)),
            default=argparse.SUPPRESS,
            metavar=_metavar(kind),
            help=f"{meta.description}{f' (default {default})' if default else ''}".replace("%", "%%"),
        )


def plan_of(plan: type[Plan], given: dict[str, Any], *, quick: bool) -> Plan:
    """The plan with the flags given; quick: with fewer and shorter requests, but for what was given."""
    changes = {**(plan.quick if quick else {}), **plan.implied(given)}
    return plan(**changes | {name: given[name] for name in plan.__struct_fields__ if name in given})


def plan_from(plan: type[Plan], texts: Mapping[str, str], *, quick: bool) -> Plan:
    """The plan with fields as their flags would be written. Raises InvalidRequest, its param the field."""
    fields = _fields(plan)
    given = {}
    for name, text in texts.items():
        if name not in fields:
            raise InvalidRequest(f"bench {plan.name} has no {name}", param=name)
        try:
            given[name] = _read(*fields[name], text.strip(), traced=_traced(plan))
        except InvalidRequest as error:
            raise InvalidRequest(f"{name.replace('_', ' ')}: {error.message}", param=name) from error
    return plan_of(plan, given, quick=quick)


def description(plan: type[Plan], name: str) -> str:
    """What a field of a plan means."""
    return _fields(plan)[name][1].description or ""


def written(value: object) -> str:
    """A value as its flag takes it."""
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return "" if value is None or value is UNSET else str(value)


def _fields(plan: type[Plan]) -> dict[str, tuple[Any, Meta]]:
    """What each field takes, and what is said of it."""
    hints = get_type_hints(plan, include_extras=True)
    return {
        name: (get_args(hint)[0], next(each for each in get_args(hint)[1:] if isinstance(each, Meta)))
        for name, hint in hints.items()
        if name in plan.__struct_fields__
    }


def _traced(plan: type[Plan]) -> bool:
    """Whether its lengths may be a trace's."""
    return "trace" in plan.__struct_fields__


def _reader(kind: Any, meta: Meta, *, traced: bool) -> Callable[[str], Any]:
    """What reads one value from its text, for argparse."""

    def read(text: str) -> Any:
        try:
            return _read(kind, meta, text, traced=traced)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return read


def _read(kind: Any, meta: Meta, text: str, *, traced: bool) -> Any:
    if kind is str:
        return text
    if kind is Length:
        return Length.parse(text, traced=traced)
    number = _number_of(kind)
    if get_origin(kind) is tuple:
        return tuple(_bounded(number(part), meta, part) for part in text.split(","))
    if not text and type(None) in get_args(kind):
        return None
    return _bounded(number(text), meta, text)


def _number_of(kind: Any) -> Callable[[str], float]:
    """int for int and tuple[int, ...]; seconds for what may be None; else float."""
    kinds = get_args(kind)
    if kind is int or kinds[:1] == (int,):
        return _whole
    return _seconds if type(None) in kinds else _real


def _whole(text: str) -> int:
    if not text.strip().removeprefix("-").isdecimal() or len(text) > 20:
        raise InvalidRequest(f"{text or 'nothing'} is no whole number")
    return int(text)


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InvalidRequest(f"{text or 'nothing'} is no number")
    return value


def _seconds(text: str) -> float:
    """From "500ms", "0.5s" or "0.5"."""
    plain, factor = (text[:-2], 0.001) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = factor * float(plain)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{text or 'nothing'} is no time; one looks like 500ms or 0.5s")
    return seconds


def _bounded(value: float, meta: Meta, text: str) -> float:
    least, above, most = meta.ge, meta.gt, meta.le
    if (least is not None and value < least) or (most is not None and value > most):
        raise InvalidRequest(f"{text} is not between {least if least is not None else above} and {most}")
    if above is not None and value <= above:
        raise InvalidRequest(f"{text} is not more than {above}")
    return value


def _metavar(kind: Any) -> str:
    if kind is Length:
        return "TOKENS"
    if get_origin(kind) is tuple:
        return "N,..."
    if type(None) in get_args(kind):
        return "TIME"
    return "FILE" if kind is str else "N"
