"""How the engine runs, whatever model it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.config.model import BackendName
from engine.errors import InvalidRequest
from engine.text.printable import format_number

WorkerHostName = Literal["process", "thread"]
PrefixSharing = Literal["key", "system", "all"]

MAX_TIMEOUT_S = 10**7
MAX_THREADS = 1024
NUM_WORKERS = (1, 64)
MAX_PROMPTS = (1, 4096)
STEP_TOKENS = (16, 10**6)
MAX_MODELS = 1000

_LIBRARIES: tuple[BackendName, ...] = ("exllamav2", "exllamav3")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine runs, whatever model it holds.

    max_prompts: requests a worker works on at once.  max_queue: requests that may wait; more are QueueFull.
    library_prompts: where max_prompts is a default, that of models on exllamav2 and exllamav3, and of others that do
    not fit with max_prompts; 0: of none.
    timeout_s: 0 means no limit.  step_tokens: token budget of one step (prefill chunks and decodes together).
    page_tokens: tokens per KV page.
    threads: CPU threads of each worker; 0 shares the machine's cores out.
    hang_s: a worker with work that reports nothing for so long is replaced; 0: never.
    max_deaths: crashes in a row after which a worker is left dead.
    ageing_s: waiting so long is worth one priority.
    idle_unload_s: a model without requests for so long gives its memory back until one comes; 0: never.
    max_models: models in memory at once, where a request has one loaded; 0: as many as fit.
    devices: GiB of each simulated device, in place of the machine's own; () takes those.
    cluster: "local", "auto" or "ray://HOST:PORT": where workers run.
    state_dir: where it is remembered what loads really used; None forgets it.
    log_dir: where native output of workers goes; None keeps it in memory only.
    slo_ttft_s, slo_itl_s: what answers are held to (goodput); None is not asked for. Steps of our own engine keep the
    latter, by how many prompt tokens they compute.
    energy_rate: what a kWh costs, None where nothing is to be reckoned; energy_currency: in what.
    prefix_sharing: requests that share the prefix cache. "key": those of one tenant (GenerateRequest.tenant); "system":
    also those of all tenants, for their system prompts; "all": all of them.
    show_prompts: the texts of the last requests are kept in memory, for the operator to read.
    """

    num_workers: int = 1
    max_prompts: int = 16
    library_prompts: int = 0
    max_queue: int = 1024
    timeout_s: float = 600.0
    worker_host: WorkerHostName = "process"
    step_tokens: int = 512
    page_tokens: int = 16
    threads: int = 0
    restart_backoff_s: float = 0.5
    max_restart_backoff_s: float = 30.0
    hang_s: float = 60.0
    max_deaths: int = 5
    ageing_s: float = 30.0
    idle_unload_s: float = 0.0
    max_models: int = 0
    devices: tuple[float, ...] = ()
    cluster: str = "local"
    state_dir: Path | None = None
    log_dir: Path | None = None
    prefix_sharing: PrefixSharing = "key"
    show_prompts: bool = False
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    energy_rate: float | None = None
    energy_currency: str = ""

    def for_backend(self, backend: BackendName) -> EngineConfig:
        """Return the settings of a model on `backend`."""
        if not self.library_prompts or backend not in _LIBRARIES:
            return self
        return msgspec.structs.replace(self, max_prompts=self.library_prompts)

    @property
    def with_fewer_prompts(self) -> EngineConfig | None:
        """The settings of a model that does not fit with max_prompts; None where that is no default, or the smaller."""
        fits_more = 0 < self.library_prompts < self.max_prompts
        return msgspec.structs.replace(self, max_prompts=self.library_prompts) if fits_more else None

    def validate(self) -> EngineConfig:
        """Itself, or InvalidRequest naming the first field out of range."""
        for param, low, high in (
            ("num_workers", *NUM_WORKERS),
            ("max_prompts", *MAX_PROMPTS),
            ("library_prompts", 0, MAX_PROMPTS[1]),
            ("max_queue", 0, 10**6),
            ("timeout_s", 0, MAX_TIMEOUT_S),
            ("step_tokens", *STEP_TOKENS),
            ("page_tokens", 1, 4096),
            ("threads", 0, MAX_THREADS),
            ("hang_s", 0, MAX_TIMEOUT_S),
            ("max_deaths", 1, 1000),
            ("ageing_s", 0.001, MAX_TIMEOUT_S),
            ("idle_unload_s", 0, MAX_TIMEOUT_S),
            ("max_models", 0, MAX_MODELS),
            ("slo_ttft_s", 1e-6, MAX_TIMEOUT_S),
            ("slo_itl_s", 1e-6, MAX_TIMEOUT_S),
            ("energy_rate", 0, 10**6),
        ):
            value = getattr(self, param)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(
                    f"{param} is {format_number(value)}; it must be between {low} and {high}", param=param
                )
        return self
