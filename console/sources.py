"""Where settings come from: flags, ERICLLM_* variables and config.toml, merged; and where a bad value stands."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from console.settings import APP_NAME, ENV_PREFIX, Settings, config_path
from engine.errors import InvalidRequest

_SECRETS = {"api_key"}
_NOT_SETTINGS = {"ERICLLM_CONFIG", "ERICLLM_BACKEND_FACTORY", "ERICLLM_NATIVE"}


def load_settings(
    flags: Mapping[str, Any], *, env: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """The settings from flags given, ERICLLM_* variables and config.toml.

    Raises InvalidRequest with one sentence that names the value and where it stands.
    """
    env = os.environ if env is None else env
    file = config_path(env) if file is None else file
    from_file = _read_file(file, required=bool(env.get("ERICLLM_CONFIG")))
    from_env = _read_env(env)
    merged = {**from_file, **from_env, **flags}
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise _worded(error, flags, from_env, file) from None
    if settings.cache_8bit and settings.cache_bits not in (16, 8):
        raise InvalidRequest(
            f"--cache_8bit asks for 8 bits and --cache-bits for {settings.cache_bits}; give one of them",
            param="cache_bits",
        )
    return settings


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some of them changed, as strictly checked as flags are. Raises InvalidRequest."""
    if not changes:
        return settings
    for name in changes:
        if name not in Settings.model_fields:
            raise InvalidRequest(f"{name} is no setting of {APP_NAME}{_nearest(name)}", param=name)
    try:
        return Settings(**{name: getattr(settings, name) for name in Settings.model_fields} | dict(changes))
    except ValidationError as error:
        raise _worded(error, changes, {}, config_path()) from None


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in _NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in Settings.model_fields:
            raise InvalidRequest(f"{variable} is no setting of {APP_NAME}{_nearest(name, ENV_PREFIX)}", param=name)
        values[name] = value
    return values


def _read_file(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise InvalidRequest(f"ERICLLM_CONFIG names {file}, which does not exist", param="config") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="config") from None
    for name in values:
        if name not in Settings.model_fields:
            raise InvalidRequest(f"{name!r} in {file} is no setting of {APP_NAME}{_nearest(name)}", param=name)
    return values


def _nearest(name: str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    if not near:
        return ""
    return f"; did you mean {prefix + near[0].upper() if prefix else near[0]}?"


def _worded(
    error: ValidationError, flags: Mapping[str, Any], from_env: Mapping[str, Any], file: Path
) -> InvalidRequest:
    """One sentence for the first problem, naming the flag, the variable or the file it came from."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    if name in flags:
        where = f"--{name}"
    elif name in from_env:
        where = ENV_PREFIX + name.upper()
    else:
        where = f"{name!r} in {file}"
    if problem["type"] in ("string_too_short", "too_short"):
        return InvalidRequest(f"{where} is empty", param=name)
    value = "" if name in _SECRETS else _shown(flags.get(name, from_env.get(name, problem["input"])))
    reason = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be").partition(", unable")[0]
    return InvalidRequest(f"{where} {value}".rstrip() + f": {reason[0].lower()}{reason[1:]}", param=name)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value)
