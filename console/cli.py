"""The `ericllm` command: flags in, console or headless server out.

Nothing heavy is imported before it is known to be needed, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from console.config_file import sample
from console.setting_fields import fields
from console.settings import APP_NAME, TUNED_FILE, Flag, Settings, config_path, state_dir
from console.sources import Sources, load_settings
from engine.errors import EngineError, InvalidRequest

USAGE_ERROR = 2
FAILURE = 1
_ELSEWHERE = {
    "attach": "console.attach",
    "top": "console.top",
    "record": "console.recording.command",
    "replay": "console.recording.command",
}
"""Commands that load no engine, and where each is."""

_NO_SCREEN = "--read-only is about the screens, and there are none; a key with the scope watch does that over HTTP"
ABOUT = (
    "Operator console for serving language models on your own hardware. Without arguments it opens "
    "on the built-in demo model."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 after a failure, 2 for a bad value."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["config"]:
        return _config(argv[1:])
    if argv[:1] == ["keys"]:
        return _keys(argv[1:])
    try:
        if argv[:1] == ["doctor"]:
            return _doctor(argv[1:])
        if argv[:1] == ["quantize"]:
            return _quantize(argv[1:])
        if argv[:1] == ["bench"]:
            return _bench(argv[1:])
        if argv[:1] == ["plan"]:
            return _plan(argv[1:])
        if argv[:1] == ["estimate"]:
            return _estimate(argv[1:])
        if argv[:1] == ["autotune"]:
            return _autotune(argv[1:])
        if argv[:1] == ["api-keys"]:
            return _api_keys(argv[1:])
        if argv[:1] and argv[0] in _ELSEWHERE:
            return _elsewhere(argv[0], argv[1:])
        return _run(sources_of(argv))
    except EngineError as error:
        print(f"{APP_NAME}: {error.message}", file=sys.stderr)
        return USAGE_ERROR if error.http_status < 500 else FAILURE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, `head` say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def sources_of(argv: Sequence[str]) -> Sources:
    """All settings, where these flags are given; a wrong flag ends the program. Raises InvalidRequest."""
    return Sources.read(_parse(argv, _parser(APP_NAME, ABOUT)))


def _config(argv: Sequence[str]) -> int:
    parser = _Parser(prog=f"{APP_NAME} config", description="Print a commented config.toml, or where it belongs.")
    parser.add_argument("what", choices=("sample", "path"))
    what = parser.parse_args(argv).what
    print(sample() if what == "sample" else config_path(), end="" if what == "sample" else "\n")
    return 0


def _keys(argv: Sequence[str]) -> int:
    parser = _Parser(prog=f"{APP_NAME} keys", description="Print every key as a commented keys.toml, or its path.")
    parser.add_argument("what", nargs="?", choices=("sample", "path"), default="sample")
    what = parser.parse_args(argv).what
    from console.bound import all_bound
    from console.keys_file import keys_path, sample

    print(sample(all_bound()) if what == "sample" else keys_path(), end="" if what == "sample" else "\n")
    return 0


def _doctor(argv: Sequence[str]) -> int:
    """Examine this machine for what `ericllm` with the same flags would need; 0 where it could run, else 1."""
    parser = _parser(f"{APP_NAME} doctor", "Say what this machine has and lacks for these flags, and how to mend it.")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the report for programs")
    flags = _parse(argv, parser)
    wanted_json = flags.pop("as_json")
    settings = load_settings(flags)
    from console.doctor import as_json, as_text, diagnose

    report = diagnose(settings)
    print(as_json(report) if wanted_json else as_text(report))
    return 0 if report.can_run else FAILURE


def _quantize(argv: Sequence[str]) -> int:
    from console.quantize import quantize

    return quantize(_dashed(argv), _Parser(prog=f"{APP_NAME} quantize", allow_abbrev=False))


def _api_keys(argv: Sequence[str]) -> int:
    from console.keys_command import api_keys

    return api_keys(_dashed(argv), _Parser(prog=f"{APP_NAME} api-keys", allow_abbrev=False))


def _estimate(argv: Sequence[str]) -> int:
    """Say what a model would take of each device with these flags; 0 where it could be loaded, else 1."""
    parser = _parser(f"{APP_NAME} estimate", "Say what a model would take of each device, and whether it fits.")
    parser.add_argument("name", metavar="MODEL", nargs="?", help="the model, as --model takes it")
    parser.add_argument("--workers", dest="num_workers", metavar="N", default=argparse.SUPPRESS, help="--num-workers")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the estimate for programs")
    flags = _parse(argv, parser)
    name, wanted_json = flags.pop("name"), flags.pop("as_json")
    settings = load_settings(flags | ({"model": name} if name is not None else {}))
    from console.estimate import as_json, as_text, estimate_for

    found = estimate_for(settings)
    print(as_json(found) if wanted_json else as_text(found))
    return 0 if found.can_load else FAILURE


def _autotune(argv: Sequence[str]) -> int:
    """Find the settings for a model on this machine; 0 where some keep the SLO, else 1."""
    from console.autotune.command import DESCRIPTION, add_arguments, autotune

    parser = _parser(f"{APP_NAME} autotune", DESCRIPTION)
    add_arguments(parser)
    given = argparse.Namespace(**_parse(argv, parser))
    flags = {name: value for name, value in vars(given).items() if name in Settings.model_fields}
    if given.name is not None:
        flags["model"] = given.name
    return autotune(load_settings(flags), given)


def _bench(argv: Sequence[str]) -> int:
    from console.bench.command import bench

    return bench(_dashed(argv), _Parser(prog=f"{APP_NAME} bench", allow_abbrev=False))


def _plan(argv: Sequence[str]) -> int:
    from console.planning.command import plan

    return plan(_dashed(argv), _Parser(prog=f"{APP_NAME} plan", allow_abbrev=False))


def _elsewhere(command: str, argv: Sequence[str]) -> int:
    run: Callable[[Sequence[str], argparse.ArgumentParser], int] = getattr(import_module(_ELSEWHERE[command]), command)
    return run(_dashed(argv), _Parser(prog=f"{APP_NAME} {command}", allow_abbrev=False))


def _run(sources: Sources) -> int:
    settings = sources.settings()
    if (state_dir() / TUNED_FILE).exists():
        from console.tuned import with_tuned

        sources = with_tuned(sources, settings, state_dir())
        settings = sources.settings()
    from console.loading import choose_model

    choice = choose_model(settings)
    if not settings.headless and not sys.stdout.isatty():
        print(f"{APP_NAME}: stdout is no terminal; running headless", file=sys.stderr)
        settings = settings.model_copy(update={"headless": True})
    if settings.headless:
        if settings.read_only:
            raise InvalidRequest(_NO_SCREEN, param="read_only")
        from console.headless import run_headless

        return run_headless(settings, choice, sources)
    from console.terminal import run_console

    return run_console(settings, choice, sources)


def _parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags given; anything else ends the program with one line."""
    given, unknown = parser.parse_known_args(_dashed(argv))
    if unknown:
        names = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
        parser.error(f"there is no {unknown[0]}{f'; did you mean {near[0]}?' if near else ''}")
    return vars(given)


def _dashed(argv: Sequence[str]) -> list[str]:
    """Flags with dashes for underscores: `--max_prompts=8` -> `--max-prompts=8`."""
    return [
        argument.partition("=")[0].replace("_", "-") + "".join(argument.partition("=")[1:])
        if argument.startswith("--")
        else argument
        for argument in argv
    ]


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for an error instead of the whole usage."""

    def error(self, message: str) -> Any:
        print(f"{APP_NAME}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=description,
        epilog="Every flag may be written with dashes or underscores, and set as ERICLLM_<NAME> or in config.toml. "
        "'ericllm config sample' prints a commented config.toml, 'ericllm config path' where it belongs; "
        "'ericllm keys' prints every key of the console; 'ericllm api-keys' makes and revokes keys of the API; "
        "'ericllm doctor' says what this machine has and lacks; 'ericllm estimate' what a model would take; "
        "'ericllm quantize' makes a smaller EXL2 model; 'ericllm bench' measures what the engine costs; "
        "'ericllm autotune' finds the best settings for a model here; "
        "'ericllm plan' simulates a cluster: how many cards, what when a node dies; "
        "'ericllm attach URL' opens the console on a running instance, 'ericllm top' says in a line how one is; "
        "'ericllm record FILE' and 'ericllm replay FILE' keep what happened, and show it again.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    parser.add_argument("--version", action="version", version=f"{APP_NAME} {_version()}")
    groups: dict[str, Any] = {}
    for name, field, flag in fields():
        group = groups.setdefault(flag.group, None) or parser.add_argument_group(flag.group)
        groups[flag.group] = group
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, **_argument(name, field.annotation, flag))
    return parser


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


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(APP_NAME)
    except PackageNotFoundError:
        return "0 (not installed)"


if __name__ == "__main__":
    sys.exit(main())
