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

Every setting is a flag, an environment variable and a line of `config.toml`. A flag overrides the variable, the
variable overrides the file, the file overrides the default. Flags can be written with dashes or underscores;
`--no-NAME` turns a switch off. `ericllm config sample` prints a commented `config.toml`, `ericllm config path` its
path. The console's Settings screen shows the current value of each setting and its source. Flags of single commands:
[commands](commands.md). Environment variables that are not settings: [below](#other-environment-variables).

Generated from the schema by `python -m tools.docs_pages.settings > docs/settings.md`; a test compares the two."""

_OTHER_VARIABLES = """
## Other environment variables

Read once, when the program starts. They have no flag and no line in `config.toml`.

| variable | |
|---|---|"""
_VARIABLES = {
    "`ERICLLM_HOME`": "one folder instead of the four `XDG_*_HOME` below, for a service or a user without a home: "
    "holds `config/ericllm/config.toml`, `data`, `state` and `cache` (with models from the hub)",
    "`ERICLLM_CONFIG`": "path of the config.toml to read instead of the one in the config folder",
    "`ERICLLM_NATIVE`": "`0` disables the native CPU kernels and computes with torch; `ericllm doctor` shows which "
    "are in use",
    "`ATEN_CPU_CAPABILITY`": "`avx2` or `default` limits the CPU instructions that torch's kernels and the native "
    "kernels use",
    "`GOMP_SPINCOUNT`": "how many iterations torch's threads spin at a barrier before they sleep; default for "
    "workers: 3000, or 10000 without the native kernels ([why](performance.md#threads-that-wait))",
    "`CUDA_VISIBLE_DEVICES`": "GPUs visible to this program",
    "`HF_HOME`, `HF_HUB_CACHE`": "folder of downloaded models",
    "`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`": "access token of the hub, URL of the hub, `1` for no network "
    "access to it",
    "`XDG_CONFIG_HOME`, `XDG_DATA_HOME`, `XDG_STATE_HOME`, `XDG_CACHE_HOME`": "base folders of: settings and "
    "themes; conversations; logs, bench results and measured loads; compiled kernels",
    "`NO_COLOR`, `TEXTUAL_COLOR_SYSTEM`, `TEXTUAL_ANIMATIONS`": "colours and animations: "
    "[terminals](console.md#terminals)",
}

_USED: dict[When, str] = {
    "now": "immediately",
    "load": "to the next model loaded",
    "start": "at the next start",
}
_ABOUT: dict[Group, str] = {
    "Model": "The model to load, and how to load it.",
    "Engine": "Workers, limits, devices, KV cache and speculation.",
    "API": "The HTTP API: address, access, limits, logs.",
    "Console": "Screen and logging.",
}
_SIGNS = ((Ge, "ge", "min {}"), (Gt, "gt", "more than {}"), (Le, "le", "max {}"), (Lt, "lt", "less than {}"))


def page() -> str:
    """The whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRO
    yield ""
    yield f"Begin with these: {', '.join(_link(name, flag) for name, _, flag in fields() if flag.basic)}."
    for group in get_args(Group):
        yield from ("", f"## {group}", "", _ABOUT[group])
        for name, field, flag in fields():
            if flag.group == group:
                yield from ("", *_setting(name, field, flag))
    yield _OTHER_VARIABLES
    yield from (f"| {names} | {about} |" for names, about in _VARIABLES.items())


def _link(name: str, flag: Flag) -> str:
    """A link to a setting's heading, as GitHub names it."""
    words = f"{name.replace('_', '-')} {flag.metavar}".strip().lower()
    anchor = "".join(char for char in words if char.isalnum() or char in "- ").replace(" ", "-")
    return f"[`{name}`](#--{anchor})"


def _setting(name: str, field: FieldInfo, flag: Flag) -> Iterator[str]:
    metavar = f" {flag.metavar}" if flag.metavar else ""
    yield f"### `--{name.replace('_', '-')}{metavar}`"
    yield ""
    yield f"{field.description}. " + " ".join(_facts(name, field, flag))
    yield ""
    variable = f"{ENV_PREFIX}{name.upper()}"
    used = f"a change while the program runs applies {_USED[flag.used]}"
    yield f"`{variable}`, `{name}` in config.toml; {used}."


def _facts(name: str, field: FieldInfo, flag: Flag) -> Iterator[str]:
    default = "" if is_secret(name) else as_text(field.default)
    gpu = "" if flag.gpu is None else f"; `{flag.gpu}` on a machine with an NVIDIA GPU"
    gpu += "" if flag.gpu_library is None else f", there `{flag.gpu_library}` for models on exllamav2 and exllamav3"
    yield f"Default: `{default}`{gpu}." if default else "Not set by default."
    if choices := choices_of(field):
        yield f"One of {', '.join(f'`{choice}`' for choice in choices)}."
    if limits := list(_limits(field)):
        yield f"{', '.join(limits).capitalize()}."
    if flag.backends:
        yield f"Only with the {' and '.join(flag.backends)} backend{'s' * (len(flag.backends) > 1)}."


def _limits(field: FieldInfo) -> Iterator[str]:
    for kind, attribute, words in _SIGNS:
        for each in field.metadata:
            if isinstance(each, kind):
                limit = getattr(each, attribute)
                yield words.format(f"{int(limit) if limit == int(limit) else limit:,}")


if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")
