"""config.toml: the commented sample, made from the settings themselves, and one value of a person's own changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from console.settings.schema import APP_NAME, ENV_PREFIX, config_path, fields

# Files that are looked at now and then, to be read again once they were saved.


class WatchedFiles:
    """paths: files, or folders whose `*.toml` are meant. None of them need be there."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Return whether anything was written, made or removed since the last call. Safe on any thread."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> dict[Path, tuple[int, int, int]]:
        found = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found

    def _files(self) -> Iterator[Path]:
        for path in self._paths:
            yield from path.glob("*.toml") if path.is_dir() else (path,)


def sample() -> str:
    """A config.toml in which every setting stands commented out, at its default or an example where it has none."""
    lines = [
        f"# Settings of {APP_NAME}. Save as {config_path({})} and uncomment lines to change.",
        f"# Precedence: flag, {ENV_PREFIX}* variable, this file, default.",
    ]
    group = ""
    for name, field, flag in fields():
        if flag.group != group:
            group = flag.group
            lines += ["", f"# --- {group} " + "-" * (60 - len(group))]
        unset = " Not set by default." if flag.example is not None else ""
        gpu = f" {flag.gpu_text}." if flag.gpu_text else ""
        lines += ["", f"# {field.description}.{_choices(field.annotation)}{_only_on(flag.backends)}{unset}{gpu}"]
        lines.append(f"# {name} = {_toml(field.default if flag.example is None else flag.example)}")
    return "\n".join([*lines, *_PROFILE]) + "\n"


_PROFILE = (
    "",
    "# --- Models by name " + "-" * 46,
    "",
    "# A name for clients, with a model and settings of its own: any option of a load. docs/models.md has the rest.",
    "#   [models.coder]",
    '#   model = "Qwen2.5-Coder-7B-EXL2"',
    '#   aliases = ["gpt-4o"]',
    "#   pin = true",
    "#   sampling = { temperature = 0.2 }",
)


def edit_toml(text: str, name: str, value: Any) -> str:
    """`text` of a config.toml with one setting changed, None taking it out; comments and order stay as they are."""
    import tomlkit

    document = tomlkit.parse(text)
    if value is not None:
        document[name] = value
    elif name in document:
        del document[name]
    return tomlkit.dumps(document)


def _choices(annotation: Any) -> str:
    values = [value for value in get_args(annotation) if isinstance(value, str | int)]
    return f" One of: {', '.join(map(str, values))}." if values else ""


def _only_on(backends: tuple[str, ...] | None) -> str:
    return f" Only with the {' and '.join(backends)} backend{'s' * (len(backends) > 1)}." if backends else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps([str(item) if not isinstance(item, float) else item for item in value])
    return json.dumps(value)
