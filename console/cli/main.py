"""The `ericllm` command: flags in, console or headless server out.

Nothing heavy is imported before it is known to be needed, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import console.cli
from console.cli.parser import FAILURE, USAGE_ERROR, Parser, add_every_setting, parse, with_dashes
from console.runtime.output import open_closed_streams, redirected_stream, say
from console.settings.schema import APP_NAME, TUNED_FILE, data_dir, log_dir, state_dir
from console.settings.sources import Sources
from engine.errors import EngineError, InvalidRequest
from engine.models.files import is_file
from engine.system.files import tighten_folder

Command = Callable[[Sequence[str], argparse.ArgumentParser], int]
"""Takes the arguments after its name and the parser to read them with; returns the exit code. Raises EngineError."""

NO_SCREEN = "{} is not a terminal; running headless"
_READ_ONLY = "--read-only has no effect with --headless; use a key with scope watch"
ABOUT = (
    "Operator console for serving language models on your own hardware. Without arguments it opens "
    "on the built-in demo model."
)
_FIRST_LINE = re.compile(r'"""`ericllm (?P<name>[a-z][a-z-]*)[^`]*`: (?P<summary>.+?)\.(?:"""|\n)', re.DOTALL)
_FIRST_CHARACTERS = 400


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 after a failure, 2 for a bad value."""
    open_closed_streams()
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in commands() else ""
    try:
        return command_of(name)(with_dashes(argv[1:] if name else argv), Parser(name))
    except EngineError as error:
        say(error.message)
        return USAGE_ERROR if error.http_status < 500 else FAILURE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, `head` say
        return FAILURE


def _run(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Without a command: the console, or the server without a screen."""
    add_every_setting(parser, ABOUT, _epilog())
    sources = Sources.read(parse(argv, parser))
    settings = sources.settings()
    for folder in (data_dir(), state_dir(), log_dir()):
        tighten_folder(folder)
    if is_file(state_dir() / TUNED_FILE):
        from console.tuning.profiles import with_tuned

        sources = with_tuned(sources, settings, state_dir())
        settings = sources.settings()
    from console.runtime.loading import choose_model

    choice = choose_model(settings, sources.profiles)
    if not settings.headless and (stream := redirected_stream()):
        say(NO_SCREEN.format(stream))
        settings = settings.model_copy(update={"headless": True})
    if settings.headless:
        if settings.read_only:
            raise InvalidRequest(_READ_ONLY, param="read_only")
        from console.runtime.headless import run_headless

        return run_headless(settings, choice, sources)
    from console.tui.terminal import run_console

    return run_console(settings, choice, sources)


def commands() -> dict[str, str]:
    """Return the commands with a summary of each: files of console.cli whose first line says `ericllm NAME`."""
    found: dict[str, str] = {}
    for finder, module, _ in pkgutil.iter_modules(console.cli.__path__):
        spec = finder.find_spec(module, None)
        if spec is None or spec.origin is None:
            continue
        with Path(spec.origin).open(encoding="utf-8") as file:
            line = _FIRST_LINE.match(file.read(_FIRST_CHARACTERS))
        if line is not None and line["name"].replace("-", "_") == module:
            found[line["name"]] = " ".join(line["summary"].split())
    return found


def command_of(name: str) -> Command:
    """Return a command, whose module is imported when it is wanted; "" is the console or the server."""
    if not name:
        return _run
    module = name.replace("-", "_")
    found: Command = getattr(import_module(f"console.cli.{module}"), module)
    return found


def _epilog() -> str:
    each = "; ".join(f"'{APP_NAME} {name}': {summary}" for name, summary in commands().items())
    return f"Commands, each with a --help of its own: {each}."


if __name__ == "__main__":
    sys.exit(main())
