"""Models, adapters and settings that clients over HTTP may name, and the folders that are open to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from console.link.rpc import Names
from console.settings.load_options import LoadOptions, load_options, names_folder
from console.settings.schema import Settings, fields
from engine.engine import Engine
from engine.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from engine.models.adapters import CONFIG, describe_adapter
from engine.models.discover import DEMO, find_folders
from engine.models.files import home_expanded
from engine.models.hub_cache import hub_cache_folder
from engine.models.resolve import is_model, resolve_local

T = TypeVar("T")

_PATH_STARTS = ("/", ".", "~")
_ABOUT_FOLDERS = frozenset({"model", *(name for name, field, _ in fields() if names_folder(field))})
"""Settings by which folders would be opened to who may only name those that are open."""


class OpenFolders:
    """Finds what clients over HTTP name, and refuses folders outside of those that are open to them.

    settings: the settings now.
    """

    def __init__(self, engine: Engine, settings: Callable[[], Settings]) -> None:
        self._engine = engine
        self._settings = settings

    async def admit(self, kind: Names, value: Any) -> Any:
        """Return a name as the settings find it, the folder of an adapter, a setting that names no folder, or options
        of a load with their folders found."""
        match kind:
            case "setting":
                if value in _ABOUT_FOLDERS:
                    raise InvalidRequest(f"{value} names files of the engine's machine; change it there", param="name")
                return value
            case "adapter":
                return str(await asyncio.to_thread(_looked_up, self._adapter_folder, value, "path"))
            case "options":
                return await self._admit_options(value)
            case "model":
                return await asyncio.to_thread(_looked_up, self._admit, value, "model")

    async def _admit_options(self, options: LoadOptions) -> LoadOptions:
        folders = {
            name: await asyncio.to_thread(_looked_up, partial(self._option_folder, name), value, name)
            for name, field, _ in load_options()
            if names_folder(field) and (value := getattr(options, name)) is not None
        }
        return msgspec.structs.replace(options, **folders)

    def _option_folder(self, option: str, name: str) -> str:
        """The folder of an adapter, or of a model."""
        if option == "lora":
            return str(self._adapter_folder(name, option))
        found = resolve_local(self._admit(name, option), self._settings().models_dir)
        if found is None:
            raise ModelNotFound(f"{option}: there is no model {name}", param=option)
        return str(found)

    def _admit(self, name: str, param: str = "model") -> str:
        """The name by which the settings find the model; one that is loaded and is found by none goes by its folder.
        Raises InvalidRequest for a folder that is none of ours."""
        folder = home_expanded(name)
        if name.startswith(_PATH_STARTS) or (name != DEMO and is_model(folder)):
            self._refuse_outside(folder, param)
        loaded = self._loaded_folders().get(name)
        if loaded is not None and resolve_local(name, self._settings().models_dir) is None:
            return str(loaded)
        return name

    def _adapter_folder(self, path: str, param: str = "path") -> Path:
        found = {each.name: each.path for each in find_folders(self._settings().models_dir, CONFIG)}
        folder = found.get(path)
        if folder is None:
            folder = home_expanded(path)
            self._refuse_outside(folder, param)
        if problem := describe_adapter(folder).problem:
            raise UnsupportedModel(problem, param=param)
        return folder

    def _refuse_outside(self, folder: Path, param: str) -> None:
        if ".." in folder.parts or not any(_plain(folder).is_relative_to(_plain(ours)) for ours in self._folders()):
            raise InvalidRequest(f"{folder} is in none of the models folders; --models-dir adds one", param=param)

    def _folders(self) -> Iterator[Path]:
        """Where models and adapters may lie. Links in there are the operator's own, so they may lead anywhere."""
        settings = self._settings()
        yield from (hub_cache_folder(), *settings.models_dir, *self._loaded_folders().values())
        if is_model(first := home_expanded(settings.model)):
            yield first
        if settings.lora is not None:
            yield home_expanded(settings.lora)

    def _loaded_folders(self) -> dict[str, Path]:
        models = self._engine.models()
        return {model.name: model.status.spec.path for model in models if model.status.spec is not None}


def _looked_up(look_up: Callable[[str], T], name: str, param: str) -> T:
    """Return the result of a look-up. Raises InvalidRequest also for a name that no file can have, or that may not be
    looked at."""
    try:
        return look_up(name)
    except OSError as error:
        raise InvalidRequest(f"{param} cannot be looked up: {error.strerror}", param=param) from None


def _plain(folder: Path) -> Path:
    """Without steps up; links are left as they are."""
    return Path(os.path.normpath(folder.absolute()))
