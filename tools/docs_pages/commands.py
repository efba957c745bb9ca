"""docs/commands.md: every command with what it takes, made of the parsers that read it.

`python -m tools.docs_pages.commands` prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from console.bench.kinds import PLANS
from console.cli.bench import RESULT_COMMANDS as READ_METHODS
from console.cli.main import command_of, commands
from console.cli.parser import Parser
from console.settings.schema import Group, Settings

_INTRO = """# Commands

Made by `python -m tools.docs_pages.commands > docs/commands.md` of the parsers that read the commands; a test compares
the two. `ericllm COMMAND --help` says the same. Flags may be written with dashes or underscores. What is a setting too
stands in [settings](settings.md), with its variable and its line of `config.toml`.
"""
_SETTINGS = "Every [setting](settings.md) is a flag of it."
_ENGINE_SETTINGS = "Every [setting](settings.md) for loading a model is a flag of it too."
_SWITCH_DEFAULT = " (default: %(default)s)"
"""What argparse adds by itself to a switch that has a --no-, in some versions of Python."""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines())


def parsers() -> Sequence[argparse.ArgumentParser]:
    """Of every command, and after it of what its first argument may be."""
    return [parser for name in ("", *commands()) for parser in _of_command(name)]


def takes_settings(parser: argparse.ArgumentParser) -> bool:
    """Return whether every setting is a flag of the command."""
    return set(Settings.model_fields) <= {action.dest for action in parser._actions}


def loads_by_settings(parser: argparse.ArgumentParser) -> bool:
    """Return whether the settings of a load are flags of the command."""
    return parser.prog.rpartition(" ")[2] in PLANS


class _Complete(Exception):
    """The parser has everything that its command gives it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class _Unread(Parser):
    """Reads nothing: its command ends where it would begin."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        raise _Complete(self)


def _of_command(name: str) -> Iterator[argparse.ArgumentParser]:
    yield _made(name)
    if name == "bench":
        yield from (_made(name, plan) for plan in PLANS)
        yield from _within(_made(name, READ_METHODS[0]))
    else:
        yield from _within(_made(name))


def _made(name: str, *argv: str) -> argparse.ArgumentParser:
    try:
        command_of(name)(argv, _Unread(name))
    except _Complete as complete:
        return complete.parser
    raise AssertionError(f"{name} reads no arguments")


def _within(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Of the commands within a command. What is said of one in its command's help is what is said of it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, found in action.choices.items():
                found.description = f"{_capital(about[name])}."
                yield found


def _lines() -> Iterator[str]:
    yield _INTRO
    found = parsers()
    yield from ("| command | |", "|---|---|")
    for parser in found:
        anchor = parser.prog.replace(" ", "-")
        yield f"| [`{parser.prog}`](#{anchor}) | {_cell(_first_sentence(parser.description or ''))} |"
    for parser in found:
        yield from _command(parser)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from ("", f"## `{parser.prog}`", "", _cell(parser.description or ""))
    if takes_settings(parser):
        yield from ("", _SETTINGS)
    if loads_by_settings(parser):
        yield from ("", _ENGINE_SETTINGS)
    positional, optional, *groups = parser._action_groups
    yield from _table("", [*positional._group_actions, *optional._group_actions], parser)
    for group in groups:
        if loads_by_settings(parser) and group.title in get_args(Group):
            continue
        yield from _table(f"{_capital(group.title or '')}:", group._group_actions, parser)


def _table(title: str, actions: Sequence[argparse.Action], parser: argparse.ArgumentParser) -> Iterator[str]:
    listed = [action for action in actions if _is_listed(action, takes_settings(parser))]
    if listed:
        yield from ("", *((title, "") if title else ()), "| | |", "|---|---|")
        yield from (f"| {_cell(_names(action))} | {_cell(_help_text(action, parser))} |" for action in listed)


def _is_listed(action: argparse.Action, settings: bool) -> bool:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return False
    is_setting = action.dest in Settings.model_fields and f"--{action.dest.replace('_', '-')}" in action.option_strings
    return not (settings and is_setting)


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    if not action.option_strings:
        value = action.dest.upper() if action.metavar is None else value
        return {"?": f"`[{value}]`", "*": f"`[{value} ...]`"}.get(str(action.nargs), f"`{value}`")
    return ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in action.option_strings)


def _help_text(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Its help; its values, its default and whether it must be given, where the help says nothing of them."""
    text = (action.help or "").removesuffix(_SWITCH_DEFAULT) % {**vars(action), "prog": parser.prog}
    more = []
    if action.required and action.option_strings:
        more.append("required")
    if action.choices is not None:
        more.append(f"one of {', '.join(f'`{choice}`' for choice in action.choices)}")
    if action.default not in (None, False, argparse.SUPPRESS, "", ()) and "default" not in text:
        more.append(f"default `{action.default}`")
    return "; ".join(filter(None, (text, *more)))


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _first_sentence(text: str) -> str:
    return f"{text.partition('. ')[0].removesuffix('.')}."


def _cell(text: str) -> str:
    """Text as it is, in a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")
