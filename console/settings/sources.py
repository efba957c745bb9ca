"""Where settings come from: flags, ERICLLM_* variables and config.toml, merged; and where a bad value stands."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from console.settings.model_profiles import ModelProfile, read_profiles
from console.settings.schema import APP_NAME, ENV_PREFIX, Flag, Settings, config_path, fields, flag_of, is_secret
from console.settings.values import did_you_mean
from engine.errors import InvalidRequest

_KEYS = {"api_key", "api_key_file"}
"""Two ways to give one key."""
_NOT_SETTINGS = {"ERICLLM_CONFIG", "ERICLLM_HOME", "ERICLLM_BACKEND_FACTORY", "ERICLLM_NATIVE"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a value, and its place: "--port", "ERICLLM_PORT", a path; "" for a default.

    tuned: autotune found it for the model on this hardware, and applied it.
    """

    source: Literal["flag", "variable", "file", "tuned", "default"]
    where: str


@dataclass(frozen=True, slots=True)
class Sources:
    """Values of each source, by the settings' names. file: the config.toml that was read, or where it would be.

    tuned: what is used before a default, where `tuned_in` says.  profiles: of models, in the file.
    has_gpu: True if the machine has an NVIDIA GPU, for which some defaults differ.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)
    file: Path = field(default_factory=config_path)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    tuned_in: str = ""
    profiles: Mapping[str, ModelProfile] = field(default_factory=dict)
    has_gpu: bool = False

    @classmethod
    def read(
        cls, flags: Mapping[str, Any], *, env: Mapping[str, str] | None = None, file: Path | None = None
    ) -> Sources:
        """Read variables and file. Raises InvalidRequest for an unknown name, and for an unreadable file."""
        env = os.environ if env is None else env
        file = config_path(env) if file is None else file
        saved, profiles = read_file(file, required=bool(env.get("ERICLLM_CONFIG")))
        return cls(
            flags=flags, variables=_read_env(env), saved=saved, file=file, profiles=profiles, has_gpu=has_nvidia_gpu()
        )

    def settings(self) -> Settings:
        """All of them merged. Raises InvalidRequest with one sentence that names the value and where it stands."""
        merged = dict(self.gpu_defaults)
        for given in (self.tuned, self.saved, self.variables, self.flags):
            if _KEYS & given.keys():  # one that comes first hides both of those after it
                merged = {name: value for name, value in merged.items() if name not in _KEYS}
            merged.update(given)
        try:
            settings = Settings(**merged)
        except ValidationError as error:
            raise _to_invalid_request(error, merged, self.origin) from None
        return _agreeing(settings)

    def origin(self, name: str) -> Origin:
        """Who sets a setting."""
        if name in self.flags:
            return Origin("flag", f"--{name}")
        if name in self.variables:
            return Origin("variable", ENV_PREFIX + name.upper())
        if name in self.saved:
            return Origin("file", str(self.file))
        return Origin("tuned", self.tuned_in) if name in self.tuned else Origin("default", "")

    @property
    def gpu_defaults(self) -> dict[str, Any]:
        """The defaults that differ as this machine has a GPU, and none are simulated in its place."""
        simulates = any(each.get("devices") for each in (self.saved, self.variables, self.flags))
        if simulates or not self.has_gpu:
            return {}
        return {name: flag.gpu for name, _, flag in fields() if flag.gpu is not None}

    @property
    def library_prompts(self) -> int:
        """EngineConfig.library_prompts: the default, where max_prompts is not set."""
        unset = "max_prompts" in self.gpu_defaults and self.origin("max_prompts").source == "default"
        return (flag_of("max_prompts").gpu_library or 0) if unset else 0

    @property
    def given(self) -> frozenset[str]:
        """The settings that a flag, a variable or the file sets."""
        return frozenset(self.saved) | frozenset(self.variables) | frozenset(self.flags)

    def saving(self, saved: Mapping[str, Any], profiles: Mapping[str, ModelProfile]) -> Sources:
        """The same with another content of the file."""
        return replace(self, saved=saved, profiles=profiles)


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that this program may use."""
    from engine.devices.nvml import NvmlProbe

    return bool(NvmlProbe().read())


def load_settings(
    flags: Mapping[str, Any], *, env: Mapping[str, str] | None = None, file: Path | None = None
) -> Settings:
    """The settings from flags given, ERICLLM_* variables and config.toml.

    Raises InvalidRequest with one sentence that names the value and where it stands.
    """
    return Sources.read(flags, env=env, file=file).settings()


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with some of them changed, as strictly checked as flags are. Raises InvalidRequest, which names a
    setting as forms do."""
    if not changes:
        return settings
    for name in changes:
        if name not in Settings.model_fields:
            raise InvalidRequest(
                f"{name} is not a setting of {APP_NAME}{did_you_mean(name, Settings.model_fields)}", param=name
            )
    try:
        values = {name: getattr(settings, name) for name in Settings.model_fields}
        return _agreeing(Settings(**values | dict(changes)))
    except ValidationError as error:
        raise _to_invalid_request(error, changes, lambda name: Origin("flag", setting_title(name))) from None


def setting_title(name: str) -> str:
    """ "max_prompts" -> "Max prompts", "gpu_split" -> "GPU split"."""
    first, *more = (_ACRONYMS.get(word, word) for word in name.split("_"))
    return " ".join([first[:1].upper() + first[1:], *more])


_ACRONYMS = {
    word.lower(): word for word in ("API", "CPU", "CORS", "GPU", "HTTP", "ITL", "JSON", "KV", "SLO", "TLS", "TTFT")
}


def _agreeing(settings: Settings) -> Settings:
    """Raise InvalidRequest where two settings contradict each other."""
    if settings.cache_8bit and settings.cache_bits not in (16, 8):
        raise InvalidRequest(
            f"give only one of --cache-8bit and --cache-bits {settings.cache_bits}",
            param="cache_bits",
        )
    if settings.verbose and settings.log_level not in ("info", "debug"):
        raise InvalidRequest(
            f"give only one of --verbose and --log-level {settings.log_level}",
            param="log_level",
        )
    if settings.api_key is not None and settings.api_key_file is not None:
        raise InvalidRequest("give only one of --api-key and --api-key-file", param="api_key")
    return settings


def _read_env(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in _NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in Settings.model_fields:
            near = did_you_mean(name, Settings.model_fields, lambda setting: ENV_PREFIX + setting.upper())
            raise InvalidRequest(f"{variable} is not a setting of {APP_NAME}{near}", param=name)
        values[name] = value
    return values


def read_file(file: Path, *, required: bool = False) -> tuple[dict[str, Any], dict[str, ModelProfile]]:
    """Read a config.toml: its settings, and the profiles of models; nothing where there is none. Raises
    InvalidRequest."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise InvalidRequest(f"ERICLLM_CONFIG names {file}, which does not exist", param="config") from None
        return {}, {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", param="config") from None
    profiles = read_profiles(values.pop("models"), file) if "models" in values else {}
    for name in values:
        if name not in Settings.model_fields:
            raise InvalidRequest(
                f"{name!r} in {file} is not a setting of {APP_NAME}{did_you_mean(name, Settings.model_fields)}",
                param=name,
            )
    return values, profiles


_REASONS = {
    "Input should be less than or equal to": "max",
    "Input should be greater than or equal to": "min",
    "Input should be a valid integer": "must be a whole number",
    "Input should be": "must be",
}
"""Pydantic's words for the limits of a value, and ours."""


def _to_invalid_request(
    error: ValidationError, given: Mapping[str, Any], origin: Callable[[str], Origin]
) -> InvalidRequest:
    """One sentence for the first problem, naming the flag, the variable or the file it came from."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    found = origin(name)
    where = f"{name!r} in {found.where}" if found.source == "file" else found.where
    if problem["type"] in ("string_too_short", "too_short"):
        return InvalidRequest(f"{where} is empty", param=name)
    value = "" if is_secret(name) else _shown(given.get(name, problem["input"]))
    reason = problem["msg"].removeprefix("Value error, ").partition(", unable")[0]
    for pydantic, ours in _REASONS.items():
        reason = reason.replace(pydantic, ours)
    return InvalidRequest(f"{where} {value}".rstrip() + f": {reason[0].lower()}{reason[1:]}", param=name)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value)


# Settings as flags of a command: each as the schema describes it, under the name of its group.


def add_settings(parser: argparse.ArgumentParser, names: Container[str]) -> None:
    """A flag for each of these settings. One that is not given is not in what the parser returns."""
    groups: dict[str, Any] = {}
    for name, info, flag in fields():
        if name in names:
            group = groups.setdefault(flag.group, None) or parser.add_argument_group(flag.group)
            groups[flag.group] = group
            group.add_argument(flag_name(name), dest=name, **_argument(name, info.annotation, flag))


def flag_name(name: str) -> str:
    """ "max_prompts" -> "--max-prompts"."""
    return f"--{name.replace('_', '-')}"


def no_such_flag(given: str, flags: Iterable[str]) -> str:
    """That there is no such flag, with the nearest of those that there are."""
    return f"there is no {given}{did_you_mean(given.partition('=')[0], flags)}"


def _argument(name: str, annotation: Any, flag: Flag) -> dict[str, Any]:
    field = Settings.model_fields[name]
    gpu = f"; {flag.gpu_text}" if flag.gpu_text else ""
    default = "" if field.default in (None, (), "") or annotation is bool else f" (default {field.default}{gpu})"
    only = f" [{' and '.join(flag.backends)} backend{'s' * (len(flag.backends) > 1)} only]" if flag.backends else ""
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
