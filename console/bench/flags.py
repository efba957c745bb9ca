"""Flags of a bench, made from the fields of its plan: each has one, with the field's description and bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import UNSET, Meta

from console.bench.kinds.base import Plan
from console.bench.lengths import Length
from engine.errors import InvalidRequest


def add_flags(parser: argparse._ArgumentGroup, plan: type[Plan]) -> None:
    """Add them; a value that is none ends the program with one sentence."""
    defaults = plan()
    for name, hint in get_type_hints(plan, include_extras=True).items():
        if name not in plan.__struct_fields__:
            continue
        kind, meta = get_args(hint)[0], next(each for each in get_args(hint)[1:] if isinstance(each, Meta))
        default = _written(getattr(defaults, name))
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            type=_reader(kind, meta),
            default=argparse.SUPPRESS,
            metavar=_metavar(kind),
            help=f"{meta.description}{f' (default {default})' if default else ''}".replace("%", "%%"),
        )


def plan_of(plan: type[Plan], given: dict[str, Any], *, quick: bool) -> Plan:
    """The plan with the flags given; quick: with fewer and shorter requests, but for what was given."""
    changes = {**(plan.quick if quick else {}), **plan.implied(given)}
    return plan(**changes | {name: given[name] for name in plan.__struct_fields__ if name in given})


def _reader(kind: Any, meta: Meta) -> Callable[[str], Any]:
    """What reads one value from its text."""
    number = _number_of(kind)

    def read(text: str) -> Any:
        try:
            if kind is str:
                return text
            if kind is Length:
                return Length.parse(text)
            if get_origin(kind) is tuple:
                return tuple(_bounded(number(part), meta, part) for part in text.split(","))
            return _bounded(number(text), meta, text)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return read


def _number_of(kind: Any) -> Callable[[str], float]:
    """int for int and tuple[int, ...]; seconds for what may be None; else float."""
    kinds = get_args(kind)
    if kind is int or kinds[:1] == (int,):
        return _whole
    return _seconds if type(None) in kinds else _real


def _whole(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > 20:
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
    seconds = factor * _real(plain)
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{text} is no time; one looks like 500ms or 0.5s")
    return seconds


def _bounded(value: float, meta: Meta, text: str) -> float:
    least, above, most = meta.ge, meta.gt, meta.le
    if (least is not None and value < least) or (most is not None and value > most):
        raise InvalidRequest(f"{text} is not between {least if least is not None else above} and {most}")
    if above is not None and value <= above:
        raise InvalidRequest(f"{text} is not more than {above}")
    return value


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return "" if value is None or value is UNSET else str(value)


def _metavar(kind: Any) -> str:
    if kind is Length:
        return "TOKENS"
    if get_origin(kind) is tuple:
        return "N,..."
    if type(None) in get_args(kind):
        return "TIME"
    return "FILE" if kind is str else "N"
