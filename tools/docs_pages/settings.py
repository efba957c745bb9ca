"""docs/settings.md: every flag, variable and line of config.toml, made of the one schema that they are read by.

`python -m tools.docs_pages.settings` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from console.settings.rows import as_text, choices_of
from console.settings.schema import ENV_PREFIX, Flag, Group, When, fields, is_secret

_INTRO = """# Settings

Made by `python -m tools.docs_pages.settings > docs/settings.md` of the schema that settings are read by; a test
compares the two. Each is a flag, a variable and a line of `config.toml` of the same name; a flag wins over a variable,
that over the file, the file over the default. Flags may be written with dashes or underscores, and `--no-NAME` switches
off what is on. `ericllm config sample` prints a commented file, `ericllm config path` says where it belongs; the
console's Settings screen shows what each is now and what set it. What other commands take besides:
[commands](commands.md). [Variables that are no settings](#variables-that-are-no-settings) stand at the end."""

_BESIDE = """
## Variables that are no settings

Read from the environment alone, when the program starts.

| variable | |
|---|---|"""
_VARIABLES = {
    "`ERICLLM_HOME`": "a folder for all that is kept, in place of the four `XDG_*_HOME` below: "
    "`config/ericllm/config.toml` in it is read, `data`, `state` and `cache` (with models of the hub) are written. "
    "For a service, or a user without a home",
    "`ERICLLM_CONFIG`": "the config.toml to read, in place of the one in the config folder",
    "`ERICLLM_NATIVE`": "`0` keeps the native CPU kernels off, and torch computes; `ericllm doctor` says which do",
    "`ATEN_CPU_CAPABILITY`": "`avx2` or `default` bounds the instructions of torch's kernels, and of ours with them",
    "`GOMP_SPINCOUNT`": "how long a worker's threads spin at a barrier before they sleep, in turns of a loop; workers "
    "get 3000 where it is not set, 10000 without the native kernels ([why](performance.md#threads-that-wait))",
    "`CUDA_VISIBLE_DEVICES`": "which GPUs there are for this program",
    "`HF_HOME`, `HF_HUB_CACHE`": "where downloaded models are kept and looked for",
    "`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`": "who asks the hub, which hub, and `1` for never",
    "`XDG_CONFIG_HOME`, `XDG_DATA_HOME`, `XDG_STATE_HOME`, `XDG_CACHE_HOME`": "where lie settings and themes; "
    "conversations; logs, results and what was learned of loads; compiled kernels",
    "`NO_COLOR`, `TEXTUAL_COLOR_SYSTEM`, `TEXTUAL_ANIMATIONS`": "what is drawn: [terminals](console.md#terminals)",
}

_USED: dict[When, str] = {
    "now": "at once",
    "load": "by the next model that is loaded",
    "start": "by the next start",
}
_ABOUT: dict[Group, str] = {
    "Model": "What is loaded, and how.",
    "Engine": "Workers, queue, devices and machines.",
    "API": "What is served over HTTP, and to whom.",
    "Console": "The screen.",
}
_SIGNS = ((Ge, "ge", "at least {}"), (Gt, "gt", "more than {}"), (Le, "le", "at most {}"), (Lt, "lt", "less than {}"))


def page() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRO
    for group in get_args(Group):
        yield from ("", f"## {group}", "", _ABOUT[group])
        for name, field, flag in fields():
            if flag.group == group:
                yield from ("", *_setting(name, field, flag))
    yield _BESIDE
    yield from (f"| {names} | {about} |" for names, about in _VARIABLES.items())


def _setting(name: str, field: FieldInfo, flag: Flag) -> Iterator[str]:
    metavar = f" {flag.metavar}" if flag.metavar else ""
    yield f"### `--{name.replace('_', '-')}{metavar}`"
    yield ""
    yield f"{field.description}. " + " ".join(_facts(name, field, flag))
    yield ""
    variable = f"{ENV_PREFIX}{name.upper()}"
    used = f"a value that is saved while the program runs is used {_USED[flag.used]}"
    yield f"`{variable}`, `{name}` in config.toml; {used}."


def _facts(name: str, field: FieldInfo, flag: Flag) -> Iterator[str]:
    default = "" if is_secret(name) else as_text(field.default)
    yield f"Default: `{default}`." if default else "Not set by default."
    if choices := choices_of(field):
        yield f"One of {', '.join(f'`{choice}`' for choice in choices)}."
    if limits := list(_limits(field)):
        yield f"{' and '.join(limits).capitalize()}."
    if flag.backends:
        yield f"Only with the {' and '.join(flag.backends)} backend."


def _limits(field: FieldInfo) -> Iterator[str]:
    for kind, attribute, words in _SIGNS:
        for each in field.metadata:
            if isinstance(each, kind):
                yield words.format(f"{getattr(each, attribute):,}")


if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")
