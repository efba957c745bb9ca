"""The commented sample of config.toml, made from the settings themselves."""

from __future__ import annotations

import json
from typing import Any, get_args

from console.settings import APP_NAME, ENV_PREFIX, config_path, fields


def sample() -> str:
    """A config.toml in which every setting stands commented out, at its default or an example where it has none."""
    lines = [
        f"# Settings of {APP_NAME}. Put this at {config_path({})} and uncomment what you change.",
        f"# A flag wins over an {ENV_PREFIX}* variable, a variable over this file, this file over the default.",
    ]
    group = ""
    for name, field, flag in fields():
        if flag.group != group:
            group = flag.group
            lines += ["", f"# --- {group} " + "-" * (60 - len(group))]
        unset = " Not set by default." if flag.example is not None else ""
        lines += ["", f"# {field.description}.{_choices(field.annotation)}{_only_on(flag.backends)}{unset}"]
        lines.append(f"# {name} = {_toml(field.default if flag.example is None else flag.example)}")
    return "\n".join(lines) + "\n"


def _choices(annotation: Any) -> str:
    values = [value for value in get_args(annotation) if isinstance(value, str | int)]
    return f" One of: {', '.join(map(str, values))}." if values else ""


def _only_on(backends: tuple[str, ...] | None) -> str:
    return f" Only with the {' and '.join(backends)} backend." if backends else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return json.dumps([str(item) if not isinstance(item, float) else item for item in value])
    return json.dumps(value)
