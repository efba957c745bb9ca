"""Model profiles: the tables [models.NAME] of config.toml, each a name for clients with its model and its settings.

[models.coder]
model = "Qwen2.5-Coder-7B"          # a folder, a name found in --models-dir, or a hub id; NAME itself by default
aliases = ["gpt-4o", "default"]
pin = true                          # and every other option of a load
max_model_len = 16384
idle_unload = 600                   # seconds; ttl is another name for it
sampling = { temperature = 0.2 }
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from console.settings.values import did_you_mean
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from engine.text.tokenizer_config import GenerationDefaults

if TYPE_CHECKING:
    from console.settings.schema import Settings

_SAMPLING = tuple(name for name in GenerationDefaults.__struct_fields__ if name != "max_new_tokens")
_OWN = ("model", "aliases", "sampling")


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One profile. model: as --model takes it.  options: of a load, by the names of their settings.

    sampling: values for requests that leave them open, by the names of GenerationDefaults.
    """

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    sampling: dict[str, float] = {}

    def applied_to(self, settings: Settings) -> Settings:
        """Return the settings with the options of the profile. Raises InvalidRequest."""
        from console.settings.sources import changed

        return changed(settings, self.options)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec under the names of the profile, with its sampling."""
        return msgspec.structs.replace(spec, name=self.name, aliases=self.aliases, sampling=self.sampling)


def read_profiles(table: object, file: Path) -> dict[str, ModelProfile]:
    """Return the profiles of the table [models] of a file. Raises InvalidRequest naming what is wrong, and where."""
    if not isinstance(table, dict):
        raise InvalidRequest(f"models in {file} should be tables, as [models.NAME]", param="models")
    profiles = {name: _read_profile(name, values, f"[models.{name}] in {file}") for name, values in table.items()}
    used: dict[str, str] = {name: name for name in profiles}
    for profile in profiles.values():
        for alias in profile.aliases:
            if used.setdefault(alias, profile.name) != profile.name or alias in profiles:
                raise InvalidRequest(
                    f"{alias} means both {used[alias]} and {profile.name} in {file}; give it to one of them",
                    param="models",
                )
    return profiles


def find_profile(profiles: Mapping[str, ModelProfile], name: str) -> ModelProfile | None:
    """Return the profile of a name or an alias; None where there is none."""
    if name in profiles:
        return profiles[name]
    return next((each for each in profiles.values() if name in each.aliases), None)


def _read_profile(name: str, values: object, where: str) -> ModelProfile:
    from console.settings.load_options import load_options
    from console.settings.schema import Settings

    if not isinstance(values, dict):
        raise InvalidRequest(f"{where} should be a table", param="models")
    if "ttl" in values:
        if "idle_unload" in values:
            raise InvalidRequest(f"ttl and idle_unload of {where} are the same setting; set one", param="models")
        values = {**values, "idle_unload": values["ttl"]}
        del values["ttl"]  # llama-swap's name
    options = [option for option, _, _ in load_options()]
    if "keep_alive" in values:
        raise InvalidRequest(f"keep_alive of {where}: set idle_unload, in seconds, 0 for ever", param="models")
    for key in values:
        if key not in options and key not in _OWN:
            near = did_you_mean(key, (*_OWN, *options))
            raise InvalidRequest(f"{key!r} of {where} is not a setting of a model{near}", param="models")
    aliases = values.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise InvalidRequest(f"aliases of {where} should be an array of names", param="models")
    model = values.get("model", name)
    if not (isinstance(model, str) and model):
        raise InvalidRequest(f"model of {where} should be a folder, a name or a hub id", param="models")
    profile = ModelProfile(
        name=name,
        model=model,
        aliases=tuple(dict.fromkeys(alias for alias in aliases if alias != name)),
        options={key: values[key] for key in options if key in values},
        sampling=_read_sampling(values.get("sampling", {}), where),
    )
    try:
        profile.applied_to(Settings())
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", **error.details) from None
    return profile


def _read_sampling(values: object, where: str) -> dict[str, float]:
    if not isinstance(values, dict):
        raise InvalidRequest(f"sampling of {where} should be a table", param="models")
    for name, value in values.items():
        if name not in _SAMPLING:
            near = did_you_mean(name, _SAMPLING) or f"; it takes {', '.join(_SAMPLING)}"
            raise InvalidRequest(f"{name!r} in sampling of {where} is not a parameter{near}", param="models")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} in sampling of {where} should be a number", param="models")
    _check_ranges(values, where)
    return dict(values)


def _check_ranges(values: Mapping[str, Any], where: str) -> None:
    try:
        GenerationDefaults(**values).as_params().validate()
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling of {where}: {error.message}", **error.details) from None


def names_of(profiles: Iterable[ModelProfile]) -> list[str]:
    """Return the names and aliases of profiles."""
    return [name for profile in profiles for name in (profile.name, *profile.aliases)]
