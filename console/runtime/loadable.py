"""LoadableModels: the models that requests may have loaded by name, and how each is loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from console.link.rpc import Names
from console.runtime.loading import model_spec
from console.settings.load_options import load_options
from console.settings.model_profiles import ModelProfile, find_profile
from console.settings.running_settings import LiveSettings
from console.settings.schema import Settings
from console.settings.sources import changed
from engine.config import ModelSpec
from engine.engine import LoadOrder
from engine.errors import InvalidRequest, ModelNotFound
from engine.models.discover import find_models
from engine.models.knobs import Knobs
from engine.models.resolve import resolve_local

_LIST_S = 5.0
"""The folders are searched again after this time at the earliest: any client may ask for the list."""

SettingsFor = Callable[[str], Awaitable[tuple[Settings, frozenset[str]]]]
"""The settings for a model, and the names of those that are its own."""


class LoadableModels:
    """settings: of the running program.  settings_for: those that autotune found included.  admit: refuses folders that
    are not open to clients."""

    def __init__(
        self,
        settings: LiveSettings,
        settings_for: SettingsFor,
        admit: Callable[[Names, Any], Awaitable[Any]],
    ) -> None:
        self._settings = settings
        self._settings_for = settings_for
        self._admit = admit
        self._listed: list[ModelSpec] = []
        self._listed_for: object = None
        self._listed_at = -_LIST_S
        self._searching = asyncio.Lock()

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profiles of config.toml, as it is now."""
        return self._settings.sources.profiles

    async def find(self, name: str) -> LoadOrder | None:
        """Return the model of a name, of a profile or on this machine, as far as the settings allow that it is loaded
        by requests; None for any other. Nothing is downloaded. Raises ModelLoadFailed, and InvalidRequest."""
        await asyncio.to_thread(self._settings.refresh)
        settings = self._settings.current
        profile = find_profile(self.profiles, name)
        if settings.auto_load == "off" or (profile is None and settings.auto_load != "all"):
            return None
        target = name if profile is None else profile.model
        path = await asyncio.to_thread(resolve_local, target, settings.models_dir)
        if path is None:
            return None
        if profile is None:  # what the operator has named may lie anywhere
            try:
                await self._admit("model", target)
            except (InvalidRequest, ModelNotFound):
                return None
        fitting, own = await self.settings_for(target, profile)
        spec = await asyncio.to_thread(model_spec, fitting, target, path)
        return LoadOrder(spec=spec if profile is None else profile.of(spec), knobs=knobs_in(fitting, own))

    async def settings_for(
        self, model: str, profile: ModelProfile | None, changes: Mapping[str, Any] | None = None
    ) -> tuple[Settings, frozenset[str]]:
        """Return the settings to load a model with, and the names of those that are its own.

        changes: of one load, before those of the profile, before those that autotune found. Raises InvalidRequest.
        """
        fitting, tuned = await self._settings_for(model)
        own = {**(profile.options if profile is not None else {}), **(changes or {})}
        return changed(fitting, own), tuned.union(own)

    async def listed(self) -> list[ModelSpec]:
        """Return every model that requests may have loaded, profiles first."""
        await asyncio.to_thread(self._settings.refresh)
        settings = self._settings.current
        if settings.auto_load == "off":
            return []
        async with self._searching:
            if time.monotonic() - self._listed_at >= _LIST_S or self._listed_for != (settings, self.profiles):
                self._listed = await asyncio.to_thread(_loadable, settings, self.profiles)
                self._listed_at, self._listed_for = time.monotonic(), (settings, self.profiles)
        return self._listed


def _loadable(settings: Settings, profiles: Mapping[str, ModelProfile]) -> list[ModelSpec]:
    found = {model.name: model.path for model in find_models(settings.models_dir)}
    listed = list[ModelSpec]()
    for profile in profiles.values():
        path = found.get(profile.model) or resolve_local(profile.model, settings.models_dir)
        if path is not None:
            listed.append(ModelSpec(name=profile.name, path=path, aliases=profile.aliases))
    named = {each.path for each in listed} | set(profiles)
    if settings.auto_load == "all":
        listed += [ModelSpec(name=name, path=path) for name, path in found.items() if not {name, path} & named]
    return listed


def knobs_in(settings: Settings, names: frozenset[str]) -> Knobs:
    """Return the knobs among settings of these names."""
    return cast(
        Knobs,
        {
            flag.engine or name: getattr(settings, name)
            for name, _, flag in load_options()
            if flag.knob and name in names
        },
    )
