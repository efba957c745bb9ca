"""EngineLink: all that a screen may ask for. Screens never see the engine, its loop or the API server.

`console/link/local.py` implements it over an engine in this process, `console/link/remote/` over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from console.link.api import ApiLink
from console.link.benches import BenchesLink
from console.link.chat import ConversationLink
from console.link.settings import SettingsLink
from console.link.tuning import TuningLink
from console.settings.addresses import is_loopback, unix_path
from console.settings.load_options import NO_OPTIONS, LoadOptions
from engine.backends.base import LoadProgress
from engine.config import MAX_TIMEOUT_S, SamplingParams
from engine.doctor.report import Report
from engine.errors import ErrorInfo
from engine.models.catalog import ModelEntry
from engine.placement.estimate import Estimate
from engine.requests.history import RequestDetail
from engine.snapshot import LogEntry, RequestRow, Snapshot

DRAIN_S = 30.0
MAX_PATH = 4096
MAX_NAME = 256

ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
FolderName = ModelName
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Scale = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_S)]

# What the screens ask of requests: those that ended, all about one of them, and to cancel what waits.


class RequestsLink(Protocol):
    """See console.link.protocol.EngineLink. Live requests, and the last fifty that ended, are in the snapshot."""

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Requests that ended after the first `after` ones, oldest first, as far as they are kept; and what to give as
        `after` the next time. There may be more than come at once: ask again."""

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """All about one request, live or ended (of several of that id the newest, unless `order` is given).

        Raises RequestNotFound where nothing is known of it any more.
        """

    async def cancel_queued(self, model: str = "") -> int:
        """Cancel every request that waits for a worker, of one model or of all; returns how many there were."""


# What a screen may ask for about insight. The numbers themselves come with every snapshot.


class InsightLink(Protocol):
    """Both raise engine.errors.EngineError."""

    async def reset(self) -> None:
        """Reset the counters of the session."""

    async def measure(self) -> None:
        """Measure peak CPU throughput; takes seconds, and is kept for later runs.

        Refused while requests are running: it would slow them down and find less than there is.
        """


# `link.models`: loads with settings of their own, what they would take, what was used last, and downloads.


class Fetching(msgspec.Struct, frozen=True, kw_only=True):
    """A download under way. progress: bytes over all files, those that were there already counted as done; total is 0
    while the hub is asked what there is."""

    model: str
    progress: LoadProgress


class ModelsLink(Protocol):
    """Models, for their screen. A model goes by its folder, a found name, a hub id or "demo".

    Coroutines raise EngineError.
    """

    def defaults(self) -> LoadOptions:
        """Return the options that a load gets where it sets none: the knobs as they are now, and the program's
        settings. max_model_len is None where that is the model's own context. At once."""

    def fetching(self) -> Fetching | None:
        """The download under way, None where there is none. At once."""

    async def load(
        self,
        model: ModelName,
        changes: LoadOptions = NO_OPTIONS,
        *,
        beside: bool = False,
        name: Name = "",
        rename: bool = True,
    ) -> None:
        """Load a model with `changes`; returns when it is ready, and remembers what it was loaded with.

        beside: keep the models that are loaded.  name: clients' name of it, its own if empty.
        rename: where another model has its own name, it gets a number; else the load is refused.
        """

    async def download(self, model: str) -> None:
        """Fetch a hub id, as engine.models.hub_id has it, into the hub cache and load nothing; what is there stays.

        EngineLink.cancel_load stops it, and what has come stays for the next time.
        """

    async def estimate(self, model: ModelName, changes: LoadOptions = NO_OPTIONS, *, beside: bool = False) -> Estimate:
        """Return what loading it with `changes` would take of each device now. beside: never in place of a model."""

    async def remembered(self, model: str) -> LoadOptions:
        """Return the options that it was last loaded with; none where it never was."""

    async def forget(self, model: str) -> None:
        """Remember nothing of a model any more."""


class ApiStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server as the console shows it. clients: those of the last minute, distinct by address, key and
    program; connections: open now; error: why it could not start.

    stopping: it takes no new requests and goes off when those under way have finished.
    refused_per_min: requests refused in the last minute as the engine drains, or as it stops.
    no_auth: whether it may be open to others without a key.  tls: whether it speaks HTTPS.
    """

    running: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    clients: int = 0
    connections: int = 0
    requests: int = 0
    stopping: bool = False
    refused_per_min: int = 0
    key_required: bool = False
    no_auth: bool = False
    tls: bool = False
    error: ErrorInfo | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        if unix_path(self.host):
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def is_open(self) -> bool:
        """True if it listens where others reach it, and needs no key."""
        return self.running and not self.key_required and not is_loopback(self.host)


class EngineLink(Protocol):
    """The engine, for screens. Every call may be made from the screen's own loop; none blocks it.

    Coroutines raise engine.errors.EngineError; nothing else is meant for a user.
    """

    @property
    def api(self) -> ApiLink:
        """The HTTP side: address, keys, dialects, clients and failures."""

    @property
    def conversation(self) -> ConversationLink:
        """Answers, and what a draft would take."""

    @property
    def insight(self) -> InsightLink:
        """Resetting the counters of the session, and measuring the processor."""

    @property
    def models(self) -> ModelsLink:
        """Loads with settings of their own, downloads, and what is remembered of models."""

    @property
    def settings(self) -> SettingsLink:
        """Every setting: its value, where that came from, and saving it."""

    @property
    def requests(self) -> RequestsLink:
        """Requests that ended, all about one, and cancelling what waits."""

    @property
    def tuning(self) -> TuningLink:
        """Finding the best settings of a model by trying them."""

    @property
    def benches(self) -> BenchesLink:
        """Measuring a model that serves, and what was measured before."""

    def snapshot(self) -> Snapshot:
        """The latest snapshot, at once."""

    def api_status(self) -> ApiStatus:
        """The HTTP server now."""

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Lines logged after the first `after` ones (those still kept), and the total so far."""

    async def list_models(self) -> Sequence[ModelEntry]:
        """Models found in the models folders and the hub cache, the demo first."""

    async def cancel_load(self) -> None:
        """Stop the load (or download) under way."""

    async def unload(self, model: str = "", *, drain_seconds: Seconds = DRAIN_S) -> None:
        """Unload a model, the first by default; cut off requests that run longer than `drain_seconds`."""

    async def reconfigure(
        self,
        *,
        num_workers: int | None = None,
        max_prompts: int | None = None,
        step_tokens: int | None = None,
        threads: int | None = None,
        idle_unload_s: float | None = None,
        model: str = "",
    ) -> None:
        """Set knobs of a model live; returns when accepted, growth goes on in the background."""

    async def restart_worker(self, worker_id: str) -> None:
        """Start a worker again: one that was left dead, or one that an operator does not trust any more."""

    async def drain_worker(self, worker_id: str) -> None:
        """Let a worker finish what it has, take nothing new, and go: one worker less."""

    async def drain(self) -> None:
        """Refuse new requests until `resume`; running and queued ones go on."""

    async def resume(self) -> None:
        """Take new requests again."""

    async def attach(self, name: AdapterName, path: FolderName, model: str = "", *, scale: Scale = 1.0) -> None:
        """Make the LoRA adapter in a folder usable under a name; returns when every ready worker has it."""

    async def detach(self, name: str, model: str = "") -> None:
        """Forget a LoRA adapter."""

    async def cancel_request(self, request_id: str) -> None:
        """Cancel one request, wherever it came from."""

    def sampling_defaults(self, model: str = "") -> SamplingParams:
        """Return the sampling that a loaded model's folder suggests; neutral where it says nothing."""

    async def diagnose(self) -> Report:
        """Check the engine's machine for what its settings need; takes seconds, and ends early when cancelled."""

    async def start_api(self) -> None:
        """Listen; where it stops and requests finish first, keep it on. Raises with the reason (port taken, say)."""

    async def stop_api(self, *, finish: bool = False) -> bool:
        """Stop listening; returns when it has, or False where `start_api` kept it on meanwhile.

        Requests under way are cut, or `finish` first: until then new ones are refused. Called again without `finish`,
        it cuts those that the first call waits for.
        """
