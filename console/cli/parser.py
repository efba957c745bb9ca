"""Parsers of the commands: argparse with one line for an error, and a flag for every setting."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from console.runtime.output import say, write
from console.settings.schema import APP_NAME, Settings
from console.settings.sources import add_settings, flag_name, no_such_flag

USAGE_ERROR = 2
FAILURE = 1
_EPILOG = (
    "Every flag may be written with dashes or underscores, and set as ERICLLM_<NAME> or in config.toml. "
    "'ericllm config sample' prints a commented config.toml, 'ericllm config path' where it belongs."
)


class Parser(argparse.ArgumentParser):
    """argparse for a command, with one line for an error instead of the whole usage."""

    def __init__(self, command: str = "", **options: Any) -> None:
        named: dict[str, Any] = {"prog": f"{APP_NAME} {command}".rstrip(), "allow_abbrev": False}
        super().__init__(**(named | options))

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:  # argparse itself exits with 0 where nothing could be written
            write(message.rstrip("\n"))
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> Any:
        say(f"{message} (see {self.prog} --help)")
        raise SystemExit(USAGE_ERROR)


def add_every_setting(parser: argparse.ArgumentParser, description: str, epilog: str = "") -> None:
    """Add a flag for every setting."""
    parser.description = description
    parser.epilog = f"{_EPILOG} {epilog}".strip()
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100)
    parser.add_argument("--version", action="version", version=f"{APP_NAME} {_version()}")
    add_settings(parser, Settings.model_fields)


def parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the flags that are given; anything else ends the program with one line."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(no_such_flag(unknown[0], map(flag_name, Settings.model_fields)))
    return vars(given)


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Return flags with dashes for underscores: `--max_prompts=8` -> `--max-prompts=8`."""
    return [
        argument.partition("=")[0].replace("_", "-") + "".join(argument.partition("=")[1:])
        if argument.startswith("--")
        else argument
        for argument in argv
    ]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(APP_NAME)
    except PackageNotFoundError:
        return "0 (not installed)"
