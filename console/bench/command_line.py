"""What `ericllm bench latency` and its kin are asked for on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.bench.dialects import DIALECTS
from console.bench.flags import add_flags, plan_of
from console.bench.kinds import Plan
from console.secret_file import read_secret
from console.setting_arguments import add_settings, flag_name, no_such_flag
from console.setting_fields import flag_of
from console.settings import Settings
from console.sources import Sources

_OF_SERVING = frozenset(
    {
        *("timeout", "drain_seconds", "idle_unload", "show_prompts"),
        *("slo_ttft", "slo_itl", "energy_rate", "energy_currency"),
    }
)
"""Settings of the engine that say nothing of how a model is loaded and computed."""

LOADING = frozenset(
    name for name in Settings.model_fields if flag_of(name).group in ("Model", "Engine") and name not in _OF_SERVING
)
"""The settings that a bench takes beside its own: those that a model is loaded by."""

FILES = ("json", "csv", "svg")
"""The kinds of file that a result is written as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One bench, as it was asked for. sources: of the settings that the model is loaded by.

    url: of the server to be measured, "" for an engine here.  dialect, key, tokenizer: of a server.
    model: by its name here or there, "" where none was given.  files: where the result is written, by its kind.
    samples: whether it has every request.  everything: whether all its numbers are printed.
    history: whether it is remembered.
    """

    plan: Plan
    sources: Sources
    url: str
    dialect: str
    model: str
    key: str
    tokenizer: str
    files: Mapping[str, Path]
    samples: bool
    everything: bool
    history: bool


def asked_for(argv: Sequence[str], parser: argparse.ArgumentParser, plan: type[Plan]) -> Asked:
    """What the flags ask of a bench; wrong ones end the program with one line. Raises InvalidRequest."""
    _describe(parser, plan)
    _add_own(parser)
    add_flags(parser.add_argument_group("what is measured"), plan)
    loading = LOADING - {"model", *plan.__struct_fields__}
    add_settings(parser, loading)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(_unknown(unknown, parser, plan))
    flags = {name: value for name, value in vars(given).items() if name in loading}
    _refuse_crossed(parser, given, flags)
    model = given.model or given.model_name
    return Asked(
        plan=plan_of(plan, vars(given), quick=given.quick),
        sources=Sources.read({**flags, **({"model": model} if model else {})}),
        url=given.url,
        dialect=given.dialect,
        model=model,
        key=given.key or (read_secret(given.key_file, "--key-file") if given.key_file else ""),
        tokenizer=given.tokenizer,
        files={kind: file for kind in FILES if (file := getattr(given, kind)) is not None},
        samples=given.samples,
        everything=given.everything,
        history=given.history,
    )


def _describe(parser: argparse.ArgumentParser, plan: type[Plan]) -> None:
    parser.prog += f" {plan.name}"
    parser.description = f"Measure {plan.about}."
    parser.epilog = "The flags for loading are those of 'ericllm'; ERICLLM_* and config.toml count as they do there."


def _add_own(parser: argparse.ArgumentParser) -> None:
    """What every bench takes."""
    add = parser.add_argument
    add("model_name", metavar="MODEL", nargs="?", default="", help="a folder, a hub id, demo, synthetic:7b-4.0bpw")
    add("--model", default="", metavar="NAME", help="the same; with --url the name that the server knows it by")
    add("--url", default="", help="measure this server in place of an engine in this process")
    add("--dialect", default="openai", choices=DIALECTS, help="how --url is asked (default openai)")
    add("--key-file", type=Path, metavar="FILE", help="file with the API key for --url as its first line")
    add("--key", default="", help="the API key itself, which every user of this machine sees then")
    add("--tokenizer", default="", metavar="MODEL", help="with --url: a model here with its vocabulary")
    add("--json", type=Path, metavar="FILE", help="write the result for programs, every repeat of it")
    add("--csv", type=Path, metavar="FILE", help="write a line for each row and repeat")
    add("--svg", type=Path, metavar="FILE", help="draw the first number of the table")
    add("--samples", action="store_true", help="the result has every request too")
    add("--all", action="store_true", dest="everything", help="print all numbers: every mean, deviation and percentile")
    add("--quick", action="store_true", help="a short look: fewer rows and requests, shorter answers")
    add("--history", action=argparse.BooleanOptionalAction, default=True, help="remember the result (default)")


def _unknown(unknown: Sequence[str], parser: argparse.ArgumentParser, plan: type[Plan]) -> str:
    """Why the first of them is none."""
    flag = next((each.partition("=")[0] for each in unknown if each.startswith("-")), "")
    if not flag:
        return f"one model is measured, so {unknown[0]} is one name too many"
    if any(flag in (flag_name(name), flag_name(f"no_{name}")) for name in Settings.model_fields):
        return f"{flag} says nothing of how a model is loaded, so 'bench {plan.name}' does not take it"
    return no_such_flag(flag, [each for action in parser._actions for each in action.option_strings])


def _refuse_crossed(parser: argparse.ArgumentParser, given: argparse.Namespace, flags: Mapping[str, Any]) -> None:
    """End the program for flags that do not go together."""
    if given.model and given.model_name and given.model != given.model_name:
        parser.error(f"the model is given twice: {given.model_name} and {given.model}")
    if given.key and given.key_file:
        parser.error("--key and --key-file both name a key; give one of them")
    if not given.url and (given.key or given.key_file or given.tokenizer or given.dialect != "openai"):
        parser.error("--dialect, --key, --key-file and --tokenizer are about a server; give its --url")
    if given.url and flags:
        parser.error(f"{flag_name(next(iter(flags)))} is about loading a model here, and --url measures a server")
