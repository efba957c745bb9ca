"""Snapshot: everything a panel, the API or a metrics page may know of the engine, frozen at one moment.

Nothing else crosses from the engine to a screen. Times are seconds, sizes bytes, rates per second; None is "not known".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.backends.base import BackendStats, DraftPosition, FinishReason, LoadedModel, LoadProgress, StepLimit
from engine.config import DeviceShare, ModelSpec
from engine.errors import ErrorInfo
from engine.requests.causes import Why

# Insight: the values of a session that a Snapshot carries. Times are seconds, rates per second; None is "not known".


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How `count` measurements lie, within 1% (percentiles); None while there are none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    longest: float | None = None


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens: counts[i] of them are at most bounds[i] and above the bound before it; the last are longer."""

    spread: Spread = Spread()
    bounds: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose TTFT and mean ITL kept the SLO. A limit that is None is not asked for.

    judged: requests that ended, without those that were cancelled; an error or a timeout keeps no SLO.
    within_slo, per_s: those that kept it, in all and over the last minute.
    """

    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    judged: int = 0
    within_slo: int = msgspec.field(default=0, name="kept")
    per_s: float = 0.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Work since `since` (unix time), when the engine started or an operator reset the counters.

    busy_s: time in which a worker computed.  batch: requests in a step, on average.
    prompt_tokens: those that were computed, without what the prefix cache had.
    """

    since: float = 0.0
    elapsed_s: float = 0.0
    busy_s: float = 0.0
    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    batch: float | None = None


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of the devices that workers are on. power_w: None where none of them reports it.

    unmetered: devices with workers that do not report their power.  busy_joules: of the session, while a worker
    computed.
    today_joules: since midnight of this machine's clock, earlier runs included.  rate_per_kwh: None where none is set.
    """

    power_w: float | None = None
    unmetered: int = 0
    session_joules: float = 0.0
    busy_joules: float = 0.0
    today_joules: float = 0.0
    rate_per_kwh: float | None = None
    currency: str = ""


class DeviceWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of models on a device per second, over the last seconds, and the device's limits; None where not known."""

    device: str
    flops_per_s: float = 0.0
    flops_limit_per_s: float | None = None
    bytes_per_s: float = 0.0
    bytes_limit_per_s: float | None = None


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """Where time, tokens and energy go, over the session; brought up to date once a second.

    queue, prefill, decode: seconds, of whole answers.  longest_context_tokens: prompt and answer of the longest request
    that ended.  configured_context_tokens: what the models take at most, 0 where none is loaded.
    finished: requests by finish reason.  drafts: by position; () where no backend reports them.
    """

    session: Session = Session()
    queue: Spread = Spread()
    prefill: Spread = Spread()
    decode: Spread = Spread()
    prompts: Lengths = Lengths()
    outputs: Lengths = Lengths()
    longest_context_tokens: int = 0
    configured_context_tokens: int = 0
    finished: dict[str, int] = {}
    goodput: Goodput = Goodput()
    drafts: tuple[DraftPosition, ...] = ()
    energy: Energy = Energy()
    work: tuple[DeviceWork, ...] = ()


ModelState = Literal["unloaded", "loading", "ready", "idle", "draining", "unloading", "failed"]
WorkerState = Literal["starting", "loading", "ready", "draining", "stopping", "restarting", "failed"]
RequestState = Literal["queued", "prefill", "decode", "finished"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model and where it stands. progress is of the slowest loading worker; error says why it failed.

    idle: its memory was given back for want of requests; the next one loads it again.
    """

    state: ModelState = "unloaded"
    spec: ModelSpec | None = None
    model: LoadedModel | None = None
    progress: LoadProgress | None = None
    error: ErrorInfo | None = None
    since_s: float = 0.0


class AdapterReading(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter. workers: how many of the model's workers have it; error: why one could not take it."""

    name: str
    path: Path
    workers: int = 0
    size_bytes: int = 0
    error: ErrorInfo | None = None


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A load that requests wait for. unloads: models that leave memory for it.  began: unix time of the plan.

    stay_s: seconds until they may leave, of models that were loaded a moment ago.  load_s: seconds that the load itself
    may take, by earlier ones.  loading: the models have left.
    """

    unloads: tuple[str, ...] = ()
    began: float = 0.0
    stay_s: float = 0.0
    load_s: float = 0.0
    loading: bool = False

    def remaining_s(self, at: float) -> float | None:
        """Return the seconds that are left at a unix time; None where that cannot be foretold: while models that leave
        finish their requests, and once it takes longer than expected."""
        left = self.stay_s + self.load_s - (at - self.began)
        return left if left > 0 and (self.loading or self.stay_s > 0) else None


class ModelReading(msgspec.Struct, frozen=True, kw_only=True):
    """One model that the engine holds. key: unique even while one is replaced by another of the same name.

    waiting: requests that wait until it is loaded.  plan: of that load, None where none is under way.
    loaded_by_request: a request had it loaded, by its name.

    planned, used: what placement expected of each device for one worker, and what its load really took.
    longest_context_tokens: prompt and answer of its longest request that ended.
    """

    key: str
    name: str
    status: ModelStatus
    target_workers: int = 0
    max_prompts: int = 0
    queued: int = 0
    running: int = 0
    step_tokens: int = 0
    threads: int = 0
    idle_unload_s: float = 0.0
    adapters: tuple[AdapterReading, ...] = ()
    planned: tuple[DeviceShare, ...] = ()
    used: tuple[DeviceShare, ...] = ()
    longest_context_tokens: int = 0
    waiting: int = 0
    plan: LoadPlan | None = None
    loaded_by_request: bool = False


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one process on a device; 0 and "" are "not known"."""

    pid: int
    name: str = ""
    used_bytes: int = 0


class DeviceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most a device can: dense matrix products in 16 and 32 bits, and bytes read. None where it is not known."""

    flops_16bit_per_s: float | None = None
    flops_32bit_per_s: float | None = None
    bytes_per_s: float | None = None


class DeviceSensors(msgspec.Struct, frozen=True, kw_only=True):
    """Further readings of a GPU. A reading that the device or its driver does not give is None, never 0.

    memory_utilisation: share of time in which its memory was read or written, 0..1.  fan: 0..1 of its highest speed.
    throttle_reasons: what lowers its clock now, () for nothing.  ecc_errors: uncorrected, since the driver was loaded.
    xid_errors: numbers of the Xid errors seen since the engine started, the last ones.
    pcie_rx_bytes_per_s, nvlink_rx_bytes_per_s: received by the device.
    nvlink_links, max_nvlink_links: NVLink links that are up, and all of the device.
    """

    memory_utilisation: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    max_pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    ecc_errors: int | None = None
    xid_errors: tuple[int, ...] | None = None
    fan: float | None = None
    nvlink_links: int | None = None
    max_nvlink_links: int | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """One device now. weights + kv + work + others + free = total; `others` is what other programs hold.

    node: the machine it is in, "" for this one.  utilisation: 0..1. Readings that a device does not give are None.
    others: the processes behind others_bytes, as far as the driver names them; own: those of the engine, likewise.
    limits: what it can at most, None where that is not known.  sensors: None where there are none, as of a CPU.
    capability, processors: compute capability and multiprocessors of a GPU, None where they are not known.
    """

    id: str
    name: str
    kind: Literal["cpu", "cuda", "simulated"]
    utilisation: float | None
    total_bytes: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    work_bytes: int = 0
    others_bytes: int = 0
    free_bytes: int = 0
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    node: str = ""
    others: tuple[ProcessMemory, ...] = ()
    limits: DeviceLimits | None = None
    own: tuple[ProcessMemory, ...] = ()
    sensors: DeviceSensors | None = None
    capability: tuple[int, int] | None = None
    processors: int | None = None


class WorkerReading(msgspec.Struct, frozen=True, kw_only=True):
    """One worker now. active: requests it works on; tokens_per_s: generated, over the last seconds; slowness: how many
    times as long as its peers' its steps take, 1 where it is not a slow one (`Router.compare`).

    retry_in_s: until it is started again after it died; log_tail: the last lines of native output of one that died.
    why: what the time that requests had on it went into, over the last minute.
    """

    id: str
    state: WorkerState
    devices: tuple[str, ...] = ()
    pid: int | None = None
    active: int = 0
    max_prompts: int = 0
    tokens_per_s: float = 0.0
    slowness: float = 1.0
    progress: LoadProgress | None = None
    stats: BackendStats = BackendStats()
    kv_tokens: int = 0
    step_s: float = 0.0
    rss_bytes: int = 0
    load_s: float | None = None
    restarts: int = 0
    last_error: ErrorInfo | None = None
    last_step_age_s: float | None = None
    model: str = ""
    planned: tuple[DeviceShare, ...] = ()
    used: tuple[DeviceShare, ...] = ()
    deaths_in_a_row: int = 0
    retry_in_s: float | None = None
    log_tail: tuple[str, ...] = ()
    node: str = ""
    why: Why = Why()


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request: live, or among the last finished. queued_s runs until a worker took it; itl_s is its mean.

    order: its arrival number, unique in the engine, from 1.  created_at: unix time; 0.0 is "not known".
    client: who shares the queue fairly with others.  address, key_name, program: what its client is, as the API counts
    clients; "" for what it lacks, as requests of this program itself have no address.
    queue_position: of one that waits in its model's queue, 1 is next.  expected_wait_s: until a worker takes it.
    """

    id: str
    source: str
    state: RequestState
    worker: str | None = None
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    age_s: float = 0.0
    queued_s: float = 0.0
    ttft_s: float | None = None
    itl_s: float | None = None
    tokens_per_s: float | None = None
    finish: FinishReason | None = None
    error: ErrorInfo | None = None
    model: str = ""
    client: str = ""
    priority: int = 0
    order: int = 0
    created_at: float = 0.0
    key_name: str = ""
    address: str = ""
    program: str = ""
    queue_position: int | None = None
    expected_wait_s: float | None = None

    @property
    def prompt_computed(self) -> float:
        """The share of its prompt that is computed, 0..1."""
        return min(1.0, self.computed_tokens / self.prompt_tokens) if self.prompt_tokens else 0.0


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """p50, p95 and p99 in seconds over the recent window; None while nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """One second of history. at: unix time. ttft_p50 .. itl_p95: of that second's samples, None if it had none.

    device_utilisation, device_memory: 0..1 of each device, in the order of Snapshot.devices.
    limit: what kept most of its steps from doing more; "none" where there was no more work.
    """

    at: float
    output_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    queued: int = 0
    kv_usage: float = 0.0
    device_utilisation: tuple[float | None, ...] = ()
    device_memory: tuple[float, ...] = ()
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    limit: StepLimit | None = None


class TenSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Means of the seconds of one ten: tokens by the second. at: unix time of its middle; seconds: how many it has.

    ttft_p50 .. itl_p95: the mean of the seconds that had any, None if none did.  limit: the most frequent one.
    """

    at: float
    seconds: int = 10
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    running: float = 0.0
    queued: float = 0.0
    kv_usage: float = 0.0
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    limit: StepLimit | None = None


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A change or an event, to be drawn into the graphs. at: unix time.

    kind: "knob" for what an operator turned; of alerts "worker" for a worker's death, "failure" for other failures and
    "warning" for all else; "load", "swap" and "unload" for models, "drain" for a drain's beginning and end. A kind that
    is not known is drawn as an event.
    Where it was a knob: knob is the setting's name, before and after its values, model whose it is; and settled_at when
    the workers had done what it asks for, None as long as they have not.
    """

    at: float
    text: str
    knob: str = ""
    before: float | None = None
    after: float | None = None
    model: str = ""
    settled_at: float | None = None
    kind: str = "knob"


AlertLevel = Literal["warning", "error"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong: `count` times for the same cause, first at `at`, last at `last_at`.

    id: unique over restarts of the engine, rising.  cause: of a list of codes, such as worker_died; subject: whose it
    was, a worker, a model, a client, a device or a file.  text: what happened; done: what the engine did about it;
    advice: what an operator can do. Times are unix times.
    """

    id: int
    at: float
    last_at: float
    cause: str
    subject: str
    text: str
    done: str = ""
    advice: str = ""
    level: AlertLevel = "error"
    count: int = 1


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started. They only grow."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    finished: dict[str, int] = {}
    rejected: int = 0
    requeued: int = 0
    worker_restarts: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """A cumulative histogram: counts[i] observations were <= bounds[i]; count and sum are over all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log. at: unix time; source: "engine", "w0", "api" ..."""

    at: float
    level: int
    source: str
    message: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at `at` (unix time). history: oldest first, at most 600 seconds; hour: the last hour in tens.

    status and the knobs (target_workers, max_prompts, step_tokens, threads, idle_unload_s): of the first model, the one
    that requests without a name go to; all the rest is over all models.
    errors_per_min: requests that failed or timed out in the last minute.  alerts: oldest first.
    why: what the time of all requests went into, over the last minute.
    draining_since: unix time since which new requests are refused until an operator resumes; None while they are taken.
    """

    at: float
    uptime_s: float = 0.0
    status: ModelStatus = ModelStatus()
    models: tuple[ModelReading, ...] = ()
    target_workers: int = 0
    max_prompts: int = 0
    step_tokens: int = 0
    threads: int = 0
    idle_unload_s: float = 0.0
    max_queue: int = 0
    devices: tuple[DeviceReading, ...] = ()
    workers: tuple[WorkerReading, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    queued: int = 0
    running: int = 0
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    kv_usage: float = 0.0
    prefix_hit_rate: float | None = None
    ttft: Percentiles = Percentiles()
    itl: Percentiles = Percentiles()
    e2e: Percentiles = Percentiles()
    history: tuple[Second, ...] = ()
    hour: tuple[TenSeconds, ...] = ()
    marks: tuple[Mark, ...] = ()
    totals: Totals = Totals()
    log_total: int = 0
    insight: Insight = Insight()
    errors_per_min: int = 0
    alerts: tuple[Alert, ...] = ()
    draining_since: float | None = None
    why: Why = Why()
