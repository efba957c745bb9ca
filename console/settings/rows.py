"""Settings as rows for a person: the value in use, where it came from, what is saved. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from console.link.settings import HIDDEN, Kind, SettingRow
from console.settings.schema import Flag, Settings, fields, is_secret
from console.settings.sources import Sources
from engine.system import child_process

_UNITS = {"SECONDS": "s", "DURATION": "s"}
"""Units by the placeholders of flags."""


def setting_rows(
    in_use: Settings,
    coming: Settings,
    sources: Sources,
    turned: Mapping[str, object],
    *,
    by_backend: Collection[str] = (),
) -> Iterator[SettingRow]:
    """in_use: the settings the program runs with.  coming: those it would start with now.

    turned: values in use instead of a setting, as a knob was changed.  by_backend: settings of which each backend has
    its own default, as none was changed.
    """
    for name, field, flag in fields():
        value, after = turned.get(name, getattr(in_use, name)), getattr(coming, name)
        origin = sources.origin(name)
        by_hand = value != getattr(in_use, name) and name not in by_backend
        secret = is_secret(name) or any(_has_password(each) for each in (value, sources.saved.get(name)))
        yield SettingRow(
            name=name,
            group=flag.group,
            help=_help(field, flag),
            kind=kind_of(field),
            value=_shown(value, secret),
            source="console" if by_hand else origin.source,
            where="" if by_hand else origin.where,
            default=as_text(sources.gpu_defaults.get(name, field.default)),
            when=flag.used,
            choices=choices_of(field),
            saved=_shown(sources.saved[name], secret) if name in sources.saved else None,
            wins=origin.where if origin.source in ("flag", "variable") else "",
            secret=secret,
            waits=value != after and name not in by_backend,
            basic=flag.basic,
            unit=_UNITS.get(flag.metavar, ""),
        )


def kind_of(field: FieldInfo) -> Kind:
    """Return the kind of value that a setting takes."""
    kinds = {field.annotation, *get_args(field.annotation)}
    if field.annotation is bool:
        return "switch"
    if get_origin(field.annotation) is Literal:
        return "choice"
    if get_origin(field.annotation) is tuple:
        return "list"
    return "number" if kinds & {int, float} else "text"


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """All values that a setting can have, where they are few."""
    if field.annotation is bool:
        return ("on", "off")
    return tuple(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ()


def as_text(value: object) -> str:
    """A value as a flag would take it: "on", "8", "16,24"; "" where nothing is set."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return (os.pathsep if any(isinstance(each, Path) for each in value) else ",").join(map(as_text, value))
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def toml_value(typed: str, value: object) -> Any:
    """Return a checked value as config.toml has it: paths stay as they were typed, "~" and all."""
    if isinstance(value, Path):
        return typed
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return typed.split(os.pathsep) if any(isinstance(each, Path) for each in value) else list(value)
    return value


def _has_password(value: object) -> bool:
    """Return whether a value is an address with a password in it."""
    return child_process.is_secret("", as_text(value))


def _shown(value: object, secret: bool) -> str:
    return HIDDEN if secret and value is not None else as_text(value)


def _help(field: FieldInfo, flag: Flag) -> str:
    only = (
        f" Only with the {' and '.join(flag.backends)} backend{'s' * (len(flag.backends) > 1)}."
        if flag.backends
        else ""
    )
    return f"{field.description}.{only}"
