"""The `ericllm` command: flags in, console or headless server out.

Nothing heavy is imported before it is known to be needed, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from console.runtime.output import open_closed_streams, redirected_stream, say, write
from console.settings.config_file import sample
from console.settings.schema import (
    APP_NAME,
    TUNED_FILE,
    Settings,
    config_path,
    data_dir,
    log_dir,
    state_dir,
)
from console.settings.sources import Sources, add_settings, flag_name, load_settings, no_such_flag
from engine.errors import EngineError, InvalidRequest
from engine.models.files import is_file
from engine.system.files import tighten_folder

USAGE_ERROR = 2
FAILURE = 1
Command = Callable[[Sequence[str], argparse.ArgumentParser], int]
"""Takes the arguments after its name and the parser to read them with; returns the exit code. Raises EngineError."""

NO_SCREEN = "{} is no terminal; running headless"
_READ_ONLY = "--read-only is about the screens, and there are none; a key with the scope watch does that over HTTP"
ABOUT = (
    "Operator console for serving language models on your own hardware. Without arguments it opens "
    "on the built-in demo model."
)
_EPILOG = (
    "Every flag may be written with dashes or underscores, and set as ERICLLM_<NAME> or in config.toml. "
    "'ericllm config sample' prints a commented config.toml, 'ericllm config path' where it belongs; "
    "'ericllm keys' prints every key of the console; 'ericllm api-keys' makes and revokes keys of the API; "
    "'ericllm doctor' says what this machine has and lacks; 'ericllm estimate' what a model would take; "
    "'ericllm bench' measures a model here or any server; "
    "'ericllm autotune' finds the best settings for a model here; "
    "'ericllm plan' simulates a cluster: how many cards, what when a node dies; "
    "'ericllm attach URL' opens the console on a running instance, 'ericllm top' says in a line how one is; "
    "'ericllm record FILE' and 'ericllm replay FILE' keep what happened, and show it again."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 after a failure, 2 for a bad value."""
    open_closed_streams()
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    try:
        return COMMANDS[name](_dashed(argv[1:] if name else argv), Parser(name))
    except EngineError as error:
        say(error.message)
        return USAGE_ERROR if error.http_status < 500 else FAILURE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, `head` say
        return FAILURE


def sources_of(argv: Sequence[str]) -> Sources:
    """All settings, where these flags are given; a wrong flag ends the program. Raises InvalidRequest."""
    parser = Parser()
    _add_settings(parser, ABOUT)
    return Sources.read(_parse(_dashed(argv), parser))


def _config(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    parser.description = "Print a commented config.toml, or where it belongs."
    parser.add_argument("what", choices=("sample", "path"), help="which of them")
    what = parser.parse_args(argv).what
    write(sample().rstrip("\n") if what == "sample" else str(config_path()))
    return 0


def _keys(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    parser.description = "Print every key as a commented keys.toml, or its path."
    parser.add_argument("what", nargs="?", choices=("sample", "path"), default="sample", help="which of them")
    what = parser.parse_args(argv).what
    from console.tui.bindings import all_bindings
    from console.tui.keys_file import keys_path, sample

    write(sample(all_bindings()).rstrip("\n") if what == "sample" else str(keys_path()))
    return 0


def _doctor(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Examine this machine for what `ericllm` with the same flags would need; 0 where it could run, else 1."""
    _add_settings(parser, "Say what this machine has and lacks for these flags, and how to mend it.")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report for programs")
    parser.add_argument(
        "--compile", action="store_true", help="first compile the CPU kernels, as the first load would: for images"
    )
    flags = _parse(argv, parser)
    wanted_json, compiles = flags.pop("as_json"), flags.pop("compile")
    sources = Sources.read(flags)
    from console.runtime.doctor import as_json, as_text, compile_kernels, diagnose

    if compiles:
        compile_kernels()
    report = diagnose(sources.settings(), sources)
    write(as_json(report) if wanted_json else as_text(report), as_json=wanted_json)
    return 0 if report.can_run else FAILURE


def _estimate(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Say what a model would take of each device with these flags; 0 where it could be loaded, else 1."""
    _add_settings(parser, "Say what a model would take of each device, and whether it fits.")
    parser.add_argument("name", metavar="MODEL", nargs="?", help="the model, as --model takes it")
    parser.add_argument("--workers", dest="num_workers", metavar="N", default=argparse.SUPPRESS, help="--num-workers")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the estimate for programs")
    flags = _parse(argv, parser)
    name, wanted_json = flags.pop("name"), flags.pop("as_json")
    settings = load_settings(flags | ({"model": name} if name is not None else {}))
    from console.runtime.estimate import as_json, as_text, estimate_for

    found = estimate_for(settings)
    write(as_json(found) if wanted_json else as_text(found), as_json=wanted_json)
    return 0 if found.can_load else FAILURE


def _autotune(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Find the settings for a model on this machine; 0 where some keep the SLO, else 1."""
    from console.cli.autotune import DESCRIPTION, add_arguments, autotune

    _add_settings(parser, DESCRIPTION)
    add_arguments(parser)
    given = argparse.Namespace(**_parse(argv, parser))
    flags = {name: value for name, value in vars(given).items() if name in Settings.model_fields}
    if given.name is not None:
        flags["model"] = given.name
    return autotune(load_settings(flags), given)


def _run(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Without a command: the console, or the server without a screen."""
    _add_settings(parser, ABOUT)
    sources = Sources.read(_parse(argv, parser))
    settings = sources.settings()
    for folder in (data_dir(), state_dir(), log_dir()):
        tighten_folder(folder)
    if is_file(state_dir() / TUNED_FILE):
        from console.tuning.profiles import with_tuned

        sources = with_tuned(sources, settings, state_dir())
        settings = sources.settings()
    from console.runtime.loading import choose_model

    choice = choose_model(settings)
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


def _of(module: str, function: str) -> Command:
    """A command whose module is imported when it is wanted."""

    def run(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
        command: Command = getattr(import_module(module), function)
        return command(argv, parser)

    return run


COMMANDS: Mapping[str, Command] = {
    "": _run,
    "config": _config,
    "keys": _keys,
    "doctor": _doctor,
    "estimate": _estimate,
    "bench": _of("console.cli.bench", "bench"),
    "autotune": _autotune,
    "plan": _of("console.cli.plan", "plan"),
    "api-keys": _of("console.cli.api_keys", "api_keys"),
    "attach": _of("console.cli.attach", "attach"),
    "top": _of("console.cli.top", "top"),
    "record": _of("console.cli.record", "record"),
    "replay": _of("console.cli.record", "replay"),
}
"""By the first argument; "" where that is none of them."""


def _parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags given; anything else ends the program with one line."""
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(no_such_flag(unknown[0], map(flag_name, Settings.model_fields)))
    return vars(given)


def _dashed(argv: Sequence[str]) -> list[str]:
    """Flags with dashes for underscores: `--max_prompts=8` -> `--max-prompts=8`."""
    return [
        argument.partition("=")[0].replace("_", "-") + "".join(argument.partition("=")[1:])
        if argument.startswith("--")
        else argument
        for argument in argv
    ]


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


def _add_settings(parser: argparse.ArgumentParser, description: str) -> None:
    """A flag for every setting."""
    parser.description = description
    parser.epilog = _EPILOG
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100)
    parser.add_argument("--version", action="version", version=f"{APP_NAME} {_version()}")
    add_settings(parser, Settings.model_fields)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(APP_NAME)
    except PackageNotFoundError:
        return "0 (not installed)"


if __name__ == "__main__":
    sys.exit(main())
