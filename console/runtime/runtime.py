"""The engine and the API server of one program, on one asyncio loop. Knows nothing of screens."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from console.api.server import ApiServer
from console.api.settings import ApiSettings
from console.bench.bench_runs import Benches
from console.link.local import LocalEngine
from console.link.protocol import ApiStatus, EngineLink, Fetching
from console.runtime.doctor import diagnose
from console.runtime.estimate import estimate_for
from console.runtime.loadable import LoadableModels, knobs_in
from console.runtime.loading import LookupFunction, ModelChoice, ModelLookup, backend_for, engine_config, find_model
from console.runtime.loops import CurrentLoop
from console.runtime.open_folders import OpenFolders
from console.settings.load_options import NO_OPTIONS, LoadOptions, knob_values
from console.settings.model_profiles import find_profile
from console.settings.running_settings import LiveSettings
from console.settings.schema import Settings, data_dir
from console.settings.secrets import folder_warnings, key_warnings, read_secret
from console.settings.sources import Sources, changed
from console.tuning.autotune.tuning_runs import Tuning
from console.tuning.profiles import settings_for
from engine.config import AdapterSpec
from engine.devices import parse_devices
from engine.doctor.report import Report
from engine.engine import Engine
from engine.errors import EngineBusy, EngineError, ErrorInfo, LoadCancelled, ModelLoadFailed, UnsupportedModel
from engine.metrics.alerts import add_failed_load
from engine.models.adapters import describe_adapter
from engine.models.catalog import ModelEntry
from engine.models.discover import discover
from engine.models.files import home_expanded
from engine.models.inspect import inspect
from engine.models.resolve import resolve
from engine.placement.estimate import Estimate
from engine.snapshot import ModelStatus
from engine.worker_process.fork_server import ForkServer

if TYPE_CHECKING:
    from engine.cluster import Cluster


# What the settings say to the API server.


def api_settings(settings: Settings, state_dir: Path | None) -> ApiSettings:
    """The HTTP side's part of the settings. state_dir: where keys are kept, None for nowhere.

    Reads --api-key-file; raises InvalidRequest where it holds no key.
    The engine ends an answer in time; who sends or takes it slowly gets the time for that besides.
    """
    slack_s = settings.idle_timeout + settings.body_timeout + settings.write_timeout
    return ApiSettings(
        host=settings.host,
        port=settings.port,
        api_key=_api_key(settings),
        no_auth=settings.no_auth,
        admin_remote=settings.admin_remote,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        cors_origins=settings.cors_origins,
        allowed_hosts=settings.allowed_hosts,
        dialects_off=settings.dialects_off,
        trusted_proxies=tuple(map(ipaddress.ip_network, settings.trusted_proxies)),
        state_dir=state_dir,
        address_rate=settings.request_rate,
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_kib * 2**10,
        max_json_depth=settings.max_json_depth,
        max_schema_bytes=settings.max_schema_bytes,
        max_choices=settings.max_choices,
        max_output_tokens=settings.max_output_len,
        max_stops=settings.max_stops,
        max_stop_length=settings.max_stop_length,
        idle_timeout_s=settings.idle_timeout,
        body_timeout_s=settings.body_timeout,
        write_timeout_s=settings.write_timeout,
        total_timeout_s=settings.timeout + slack_s if settings.timeout else None,
        access_log=settings.access_log,
        owns_stdout=settings.headless,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
    )


def _api_key(settings: Settings) -> str | None:
    if settings.api_key is not None:
        return settings.api_key.get_secret_value()
    return None if settings.api_key_file is None else read_secret(settings.api_key_file, "--api-key-file")


T = TypeVar("T")
log = logging.getLogger(__name__)


class Runtime:
    """One engine with its API server. Every coroutine runs on the loop that `start` ran on."""

    def __init__(
        self,
        settings: Settings,
        *,
        log_dir: Path | None = None,
        state_dir: Path | None = None,
        cluster: Cluster | None = None,
        sources: Sources | None = None,
        forks: ForkServer | None = None,
        library_prompts: int = 0,
    ) -> None:
        self.starting = False
        """True until the first model begins to load: a screen need not offer one meanwhile."""
        self.state_dir = state_dir
        self._cluster = cluster
        self.engine = Engine(
            msgspec.structs.replace(
                engine_config(settings, log_dir),
                state_dir=state_dir,
                library_prompts=library_prompts if sources is None else sources.library_prompts,
            ),
            new_host=cluster.new_host if cluster is not None else None,
            probe=cluster.probe() if cluster is not None else None,
            forks=forks,
        )
        self.engine.publish_for(settings.refresh_hz)
        self.live_settings = LiveSettings(self.engine, settings, sources or Sources())
        self.open_folders = OpenFolders(self.engine, lambda: self.settings)
        self.loadable = LoadableModels(self.live_settings, self._settings_for, self.open_folders.admit)
        served = api_settings(settings, state_dir)
        self.api = ApiServer(self.engine, served, self.open_folders.admit, self.link, self.loadable)
        self.benches = Benches(self.engine, state_dir, lambda: self.tuning.report().sends_requests)
        self.tuning = Tuning(self.engine, state_dir, lambda: self.benches.report().under_way)
        self._api_error: ErrorInfo | None = None
        self._link: LocalEngine | None = None
        self._lookup: ModelLookup | None = None

    @property
    def settings(self) -> Settings:
        """The settings in use."""
        return self.live_settings.current

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        log_dir: Path,
        state_dir: Path,
        sources: Sources | None = None,
        forks: ForkServer | None = None,
        library_prompts: int = 0,
    ) -> Runtime:
        """A runtime that keeps logs and what it learns, in the cluster where one is asked for. Raises EngineError.

        forks: what is to fork its workers, which it closes.  library_prompts: see EngineConfig, of a runtime without
        `sources`.
        """
        cluster = None
        if settings.cluster != "local":
            from engine.cluster import Cluster

            gib = parse_devices(settings.devices) if settings.devices else ()
            cluster = await asyncio.to_thread(Cluster, settings.cluster, gib)
        return cls(
            settings,
            log_dir=log_dir,
            state_dir=state_dir,
            cluster=cluster,
            sources=sources,
            forks=forks,
            library_prompts=library_prompts,
        )

    async def start(self) -> None:
        """Start the engine; and the API where the settings want it. Raises EngineError when it cannot listen."""
        await self.engine.start()
        kept_in = () if self.state_dir is None else (data_dir(), self.state_dir)
        for warning in (*key_warnings(self.settings, self.live_settings.sources), *folder_warnings(kept_in)):
            log.warning("%s", warning)
        if self.settings.api:
            await self.start_api()

    async def load(
        self,
        choice: ModelChoice | str,
        *,
        called: str = "",
        beside: bool = False,
        renames: bool = False,
        changes: LoadOptions = NO_OPTIONS,
    ) -> None:
        """Find (and download where needed) a model and load it; raises EngineError with the reason.

        called: its name for clients, its own where empty.  beside: keep the models that are loaded.
        renames: a name that is taken gets a number, for who cannot give it another.
        changes: settings of this model for this load alone.
        """
        name = choice.name if isinstance(choice, ModelChoice) else choice
        profile = find_profile(self.loadable.profiles, name)
        if isinstance(choice, ModelChoice) and choice.spec is not None and not changes.given():
            own = frozenset() if profile is None else frozenset(profile.options)
            settings = self.settings if profile is None else profile.applied_to(self.settings)
            await self.engine.load(choice.spec, beside=beside, **knobs_in(settings, own))
            return
        target = name if profile is None else profile.model
        settings, own = await self.loadable.settings_for(target, profile, changes.as_settings())
        try:
            spec = await self._find(name, partial(find_model, settings, target))
        except ModelLoadFailed as error:  # not a mistyped name or setting: the model or the machine is at fault
            add_failed_load(self.engine.alerts, name, error, "Nothing was changed.")
            log.warning("%s: %s", name, error.message)
            raise
        spec = spec if profile is None else profile.of(spec)
        free = self._free_name(spec.name) if beside and renames else spec.name
        spec = msgspec.structs.replace(spec, name=called or free)
        await self.engine.load(spec, beside=beside, **knobs_in(settings, own))

    async def _find(self, name: str, find: LookupFunction[T]) -> T:
        """Return the result of `find` for a name, downloaded where needed (in a thread); one at a time."""
        if self._lookup is not None:
            raise EngineBusy(f"{self._lookup.name} is being downloaded; cancel that first", model=self._lookup.name)
        self._lookup = finding = ModelLookup(name)
        try:
            found = await finding.by(find)
        finally:
            self._lookup = None
        if finding.cancelled.is_set():
            raise LoadCancelled(f"The download of {name} was cancelled", model=name)
        return found

    async def download(self, model: str) -> None:
        """Fetch a hub id and load nothing. Raises EngineError."""
        folders = self.settings.models_dir
        await self._find(model, lambda report, cancelled: resolve(model, folders, report=report, cancelled=cancelled))

    def _free_name(self, name: str) -> str:
        """The name, or "name-2" and on where models have it."""
        used = {model.name for model in self.engine.models()}
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        return next(each for each in (name, *itertools.islice(numbered, len(used))) if each not in used)

    async def cancel_load(self) -> None:
        """Stop a download or a load under way."""
        if self._lookup is not None:
            self._lookup.cancelled.set()
        else:
            await self.engine.cancel_load()

    def fetching(self) -> Fetching | None:
        """Return the download under way; None where there is none."""
        lookup = self._lookup
        if lookup is None or lookup.progress is None:
            return None
        return Fetching(model=lookup.name, progress=lookup.progress)

    def download_status(self) -> ModelStatus | None:
        """Return the download under way as the status of a model; None where there is none."""
        download = self.fetching()
        return None if download is None else ModelStatus(state="loading", progress=download.progress)

    async def list_models(self) -> Sequence[ModelEntry]:
        """Models on this machine: those found, and the one that was loaded from somewhere else."""
        choose = partial(backend_for, self.settings)
        entries = await asyncio.to_thread(discover, self.settings.models_dir, choose)
        spec = self.engine.status.spec
        if spec is None or any(entry.path == spec.path for entry in entries):
            return entries
        opened = await asyncio.to_thread(inspect, spec.path, choose)
        return [*entries, msgspec.structs.replace(opened, name=spec.name, origin=str(spec.path.parent))]

    async def attach(self, name: str, path: str, model: str = "", scale: float = 1.0) -> None:
        """Make the LoRA adapter in the folder `path` usable under `name`. Raises EngineError."""
        folder = home_expanded(path)
        described = await asyncio.to_thread(describe_adapter, folder)
        if described.problem:
            raise UnsupportedModel(described.problem, param="path")
        await self.engine.attach(AdapterSpec(name=name, path=folder, scale=scale), model)

    async def estimate(self, model: str, changes: LoadOptions = NO_OPTIONS, *, beside: bool = False) -> Estimate:
        """Estimate what `load` with the same arguments would take of each device: besides what is loaded, or in place
        of the model that it replaces where it fits only so. Raises EngineError."""
        profile = find_profile(self.loadable.profiles, model)
        target = model if profile is None else profile.model
        fitting, own = await self.loadable.settings_for(target, profile)
        defaults = self.engine.defaults
        knobs = {name: value for name, value in knob_values(defaults).items() if name not in own}
        settings = changed(fitting, {**knobs, **changes.as_settings(), "model": target})
        unset = "max_prompts" not in own and changes.max_prompts is None
        estimated = partial(estimate_for, settings, library_prompts=defaults.library_prompts if unset else 0)
        now = await self.engine.devices()
        found = await asyncio.to_thread(estimated, now)
        replaced = "" if beside else self._replaced_by(found.model)
        if not replaced:
            return found
        later = await self.engine.devices(without=replaced)
        found = await asyncio.to_thread(estimated, now, later)
        if found.fits:
            return found
        alone = await asyncio.to_thread(estimated, later)
        return msgspec.structs.replace(alone, verdict=f"Replacing {replaced}: {alone.verdict}") if alone.fits else found

    async def _settings_for(self, model: str) -> tuple[Settings, frozenset[str]]:
        """Return the settings for a model, and the names of those that autotune found for it."""
        sources = self.live_settings.sources
        return await asyncio.to_thread(settings_for, sources, self.settings, self.state_dir, model)

    def _replaced_by(self, name: str) -> str:
        """The name of the loaded model whose place one called `name` would take; "" for none."""
        loaded = [each.name for each in self.engine.models() if each.status.spec is not None]
        first = self.engine.status.spec
        if name in loaded or first is None:
            return name if name in loaded else ""
        return first.name

    async def diagnose(self) -> Report:
        """Check this machine for what the settings need; the probes under way end when this is cancelled."""
        cancelled = threading.Event()
        try:
            sources = self.live_settings.sources
            return await asyncio.to_thread(diagnose, self.settings, sources, cancelled=cancelled.is_set)
        finally:
            cancelled.set()

    async def start_api(self) -> None:
        """Listen; raises EngineError with the reason, which `api_status` keeps too."""
        try:
            await self.api.start()
            self._api_error = None
        except EngineError as error:
            self._api_error = error.info
            raise

    async def stop_api(self, *, finish: bool = False) -> bool:
        """Stop listening; requests under way over HTTP are cut, or `finish` first. Returns False where `start_api`
        kept it on meanwhile."""
        return await self.api.stop(drain_s=math.inf if finish else 0.0, reason="api")

    def api_status(self) -> ApiStatus:
        """The server now; safe from any thread."""
        status = self.api.status()
        if self._api_error is None or status.running:
            return status
        return msgspec.structs.replace(status, clients=0, connections=0, requests=0, error=self._api_error)

    def link(self) -> EngineLink:
        """Return the link of code on the engine's loop: what a console elsewhere gets, and a recording."""
        if self._link is None:
            self._link = LocalEngine(self, CurrentLoop())
        return self._link

    async def close(self, drain_s: float = 5.0, patience_s: float | None = None) -> None:
        """Refuse new requests, give running ones `drain_s` to end, stop everything; workers that have not ended
        `patience_s` later are killed. Where it is cancelled, another call with less time finishes the work."""
        self.engine.refuse_new()
        await self.tuning.cancel()
        await self.benches.close()
        if self._lookup is not None:
            self._lookup.cancelled.set()
        clock = asyncio.get_running_loop().time
        until = clock() + drain_s
        await self.api.stop(drain_s=drain_s)
        await self.engine.close(drain_s=max(0.0, until - clock()), patience_s=patience_s)
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
