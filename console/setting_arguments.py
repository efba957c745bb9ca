"""Settings as flags of a command: each as the schema describes it, under the name of its group."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Container, Iterable
from typing import Any, Literal, get_args, get_origin

from console.setting_fields import fields
from console.setting_flags import Flag
from console.settings import Settings


def add_settings(parser: argparse.ArgumentParser, names: Container[str]) -> None:
    """A flag for each of these settings. One that is not given is not in what the parser returns."""
    groups: dict[str, Any] = {}
    for name, field, flag in fields():
        if name in names:
            group = groups.setdefault(flag.group, None) or parser.add_argument_group(flag.group)
            groups[flag.group] = group
            group.add_argument(flag_name(name), dest=name, **_argument(name, field.annotation, flag))


def flag_name(name: str) -> str:
    """ "max_prompts" -> "--max-prompts"."""
    return f"--{name.replace('_', '-')}"


def no_such_flag(given: str, flags: Iterable[str]) -> str:
    """That there is no such flag, with the nearest of those that there are."""
    near = difflib.get_close_matches(given.partition("=")[0], flags, n=1)
    return f"there is no {given}{f'; did you mean {near[0]}?' if near else ''}"


def _argument(name: str, annotation: Any, flag: Flag) -> dict[str, Any]:
    field = Settings.model_fields[name]
    default = "" if field.default in (None, (), "") or annotation is bool else f" (default {field.default})"
    only = f" [{' and '.join(flag.backends)} backend only]" if flag.backends else ""
    argument: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{field.description}{default}{only}"}
    if annotation is bool:
        negatable = field.default is True
        return argument | {"action": argparse.BooleanOptionalAction if negatable else "store_true"}
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return argument | {"choices": values, "type": type(values[0])}
    if name == "models_dir":
        argument["action"] = "append"
    return argument | {"metavar": flag.metavar}
