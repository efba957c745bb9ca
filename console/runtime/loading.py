"""From a model's name and the settings to what the engine loads, or one sentence why not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from console.settings.load_options import load_options
from console.settings.model_profiles import ModelProfile, find_profile
from console.settings.schema import APP_NAME, Settings, fields
from console.settings.sources import has_nvidia_gpu
from engine.backends.base import LoadProgress
from engine.backends.common.model_config import read_model_config
from engine.backends.common.torch_load_settings import apply_settings
from engine.config import BackendKind, EngineConfig, ModelSpec
from engine.devices import parse_devices, usable_cores
from engine.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from engine.models.catalog import ModelEntry
from engine.models.files import home_expanded
from engine.models.gguf.file import is_gguf, model_name
from engine.models.inspect import inspect
from engine.models.resolve import is_hub_id, resolve, resolve_local
from engine.worker_process.factory import backend_of_format, refuse_unavailable
from engine.worker_process.fork_server import ForkServer

# Finding: a model that is looked for, and downloaded or made where it must be, in a thread that ends when asked.

T = TypeVar("T")
LookupFunction = Callable[[Callable[[LoadProgress], None], Callable[[], bool]], T]
"""Finds something; takes a report of progress, and a function that returns whether to give up."""


class ModelLookup:
    """Watched from two threads. progress: how far it is, None before anything is known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cancelled = threading.Event()
        self.progress: LoadProgress | None = None

    async def by(self, find: LookupFunction[T]) -> T:
        """Return the result of `find`.

        Where this is cancelled, `find` gives up, and has ended before the cancelling goes on: nothing is cleaned up
        under it.
        """
        thread = asyncio.ensure_future(asyncio.to_thread(find, self._report, self.cancelled.is_set))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self.cancelled.set()
            await asyncio.gather(thread, return_exceptions=True)
            raise

    def _report(self, progress: LoadProgress) -> None:
        self.progress = progress


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that was asked for. spec is None for a hub id that may have to be downloaded first."""

    name: str
    spec: ModelSpec | None


def choose_model(settings: Settings, profiles: Mapping[str, ModelProfile] = MappingProxyType({})) -> ModelChoice:
    """Check --model and the flags that depend on it before anything is started. profiles: of config.toml.

    Raises ModelNotFound for a name that is nothing on this machine and no hub id, InvalidRequest for a flag
    that the model's backend cannot honour.
    """
    profile = find_profile(profiles, settings.model)
    name, fitting = (settings.model, settings) if profile is None else (profile.model, profile.applied_to(settings))
    path = resolve_local(name, settings.models_dir)
    if path is not None:
        spec = model_spec(fitting, name, path)
        return ModelChoice(settings.model, spec if profile is None else profile.of(spec))
    if not is_hub_id(name):
        resolve(name, settings.models_dir)
    return ModelChoice(settings.model, None)


async def importing_workers(settings: Settings, choice: ModelChoice) -> ForkServer | None:
    """Begin to import what workers import, which takes as long as what is left to import here: call it first. None
    where the model is not on this machine, its workers are not, or there is no other core for it."""
    is_here = choice.spec is not None and settings.cluster == "local" and settings.worker_host == "process"
    return ForkServer.importing() if is_here and usable_cores() > 1 else None


def local_folder(settings: Settings) -> Path:
    """Return the folder of the model that the settings name. Raises ModelNotFound where it is not on this machine."""
    name = settings.model
    path = resolve_local(name, settings.models_dir)
    if path is None and is_hub_id(name):
        raise ModelNotFound(f"{name} is not on this machine; '{APP_NAME} --model {name}' downloads it", model=name)
    return path or resolve(name, settings.models_dir)


def find_model(
    settings: Settings, name: str, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]
) -> ModelSpec:
    """The spec for any name, downloaded where it must be. Blocks: call it off the loop."""
    path = resolve(name, settings.models_dir, report=report, cancelled=cancelled)
    return model_spec(settings, name, path)


def model_spec(settings: Settings, name: str, path: Path) -> ModelSpec:
    """Return the spec for a model folder.

    Raises InvalidRequest for a flag that its backend cannot honour, UnsupportedModel for a folder that none can load.
    """
    entry = inspect(path, partial(backend_for, settings))
    spec = requested_spec(settings, name, path, entry.backend)
    refuse_unloadable(settings, spec, entry)
    return spec


def requested_spec(settings: Settings, name: str, path: Path, backend: BackendKind) -> ModelSpec:
    """Return the spec that the settings ask for, whether it can be honoured or not."""
    own, given = name, home_expanded(name)
    if is_gguf(path) and given in (path, path.parent):
        own = model_name(path)
    elif "/" in name and path == given:
        own = Path(name).name or name
    first, *aliases = (settings.served_model_name if name == settings.model else ()) or (own,)
    return ModelSpec(
        path=path,
        name=first,
        aliases=tuple(aliases),
        **(_spec_fields(settings) | {"backend": backend, "cache_bits": settings.effective_cache_bits}),
    )


def _spec_fields(settings: Settings) -> dict[str, Any]:
    """Return the options of a load that are fields of ModelSpec, by the names they have there."""
    named = {flag.engine or name: getattr(settings, name) for name, _, flag in load_options() if not flag.knob}
    return {
        name: home_expanded(value) if isinstance(value, Path) else value
        for name, value in named.items()
        if name in ModelSpec.__struct_fields__
    }


def refuse_unloadable(settings: Settings, spec: ModelSpec, entry: ModelEntry) -> None:
    """Raise InvalidRequest for a flag that the backend cannot honour, UnsupportedModel for a folder that none can
    load, BackendUnavailable."""
    refuse_unhonoured(settings, entry.backend)
    refuse_unavailable(entry.backend)
    if entry.problem:
        raise UnsupportedModel(f"{spec.name} cannot be loaded: {entry.problem}", model=spec.name)
    if entry.backend == "torch":
        apply_settings(read_model_config(spec.path), spec)


def backend_for(settings: Settings, quantisation: str, path: Path) -> BackendKind:
    """--backend, or what the weights' format asks for; torch where the devices are simulated."""
    if settings.backend != "auto":
        return settings.backend
    return "torch" if settings.devices else backend_of_format(quantisation, path)


def refuse_unhonoured(settings: Settings, backend: BackendKind) -> None:
    """Raise InvalidRequest for the first setting that is not at its default and means nothing to `backend`."""
    for name, field, flag in fields():
        value = getattr(settings, name)
        if flag.backends and backend not in flag.backends and value not in (field.default, flag.gpu):
            raise InvalidRequest(f"--{name} requires --backend {flag.backends[0]}", param=name)
    for name in ("gpu_balance", "gpu_split"):
        if getattr(settings, name) and not settings.devices and not has_nvidia_gpu():
            raise InvalidRequest(f"--{name} spreads workers over GPUs, and none was found", param=name)


def engine_config(settings: Settings, log_dir: Path | None) -> EngineConfig:
    """Return the engine's part of the settings."""
    named = {flag.engine or name: getattr(settings, name) for name, _, flag in fields()}
    shared = {name: value for name, value in named.items() if name in EngineConfig.__struct_fields__}
    devices = parse_devices(settings.devices) if settings.devices else ()
    return EngineConfig(**{**shared, "devices": devices, "log_dir": log_dir}).validate()
