"""`link.tuning`: what is tried to find the best settings of a model, and how that goes."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec

from console.tuning.autotune.record import Verdict
from console.tuning.autotune.space import MIN_CACHE_BITS, KnobName, Setting
from engine.errors import InvalidRequest

TuningState = Literal["none", "running", "restoring", "done", "cancelled", "failed"]
MAX_MINUTES = 24 * 60.0
MAX_USERS = 10_000
LOAD_S = 30.0
LoadSeconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class TuneOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search for settings. model: by its name, "" is the first one.

    slo_ttft_s, slo_itl_s: None takes those of the settings; percentile: of first tokens and gaps that must keep them.
    prompt, output: lengths in tokens, as written for a bench; trace: a file on the engine's machine to take them from.
    Without any of these they are as they were in this session.
    users: clients at once; as many as there are places if None.
    knobs: those that may be turned, all that can be if empty; of these, `fixed` stay as they are.
    least_cache_bits: of the KV cache.  apply: leave the engine at the winner, and start with it from now on.
    """

    model: str = ""
    minutes: Annotated[float, msgspec.Meta(gt=0, le=MAX_MINUTES)] = 10.0
    slo_ttft_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    slo_itl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 95.0
    prompt: str = ""
    output: str = ""
    trace: str = ""
    users: Annotated[int, msgspec.Meta(ge=1, le=MAX_USERS)] | None = None
    knobs: tuple[KnobName, ...] = ()
    fixed: tuple[KnobName, ...] = msgspec.field(default=(), name="kept")
    least_cache_bits: int = MIN_CACHE_BITS
    apply: bool = False
    seed: int = 0


def refuse_trace_from_elsewhere(order: TuneOrder) -> None:
    """Raise InvalidRequest, its param the field, for what only a console of the engine's own process may order."""
    if order.trace:
        raise InvalidRequest(
            "a trace is a file on the engine's machine: use a console or the command line there",
            param="trace",
        )


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was tried. low, high: where its tokens/s lie with 95% confidence, None where that is not known;
    those of ttft and itl likewise.

    verdict: how sure it is that it keeps the SLO, or breaks it.  keeps: whether it does, by what was measured.
    front: nothing beats it in both tokens/s and the latencies that are asked for, both where none is.
    best: it is the one to be used, as far as is known.
    """

    setting: Setting
    tokens_per_s: float
    low: float
    high: float | None
    ttft_s: float | None
    itl_s: float | None
    goodput_per_s: float
    verdict: Verdict
    windows: int
    ttft_low_s: float | None = None
    ttft_high_s: float | None = None
    itl_low_s: float | None = None
    itl_high_s: float | None = None
    keeps: bool = True
    front: bool = False
    best: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that could not be measured. reason: a sentence."""

    setting: Setting
    reason: str


class TuningReport(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes. stage: of the search, "coarse", "fine" or "final".  mix: what requests are like, in words.

    now: the setting that is tried.  size: of the whole grid.
    failed: settings that could not be measured, `refused` of them for want of memory.
    notes: what else happened: windows that do not count as a knob was changed, and longer ones.
    outcome: why it failed, or what came of it, in a sentence.
    load_left_s, load_clients: of a sample load that runs; 0 where none does.
    """

    state: TuningState = "none"
    model: str = ""
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    percentile: float = 95.0
    mix: str = ""
    stage: str = ""
    now: Setting | None = None
    start: Setting | None = None
    elapsed_s: float = 0.0
    budget_s: float = 0.0
    size: int = 0
    knobs: tuple[KnobName, ...] = ()
    windows: int = 0
    refused: int = 0
    failed: tuple[Failed, ...] = ()
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    applied: bool = False
    outcome: str = msgspec.field(default="", name="said")
    load_left_s: float = 0.0
    load_clients: int = 0

    @property
    def best(self) -> Tried | None:
        """The setting to be used."""
        return next((each for each in self.tried if each.best), None)

    @property
    def under_way(self) -> bool:
        """True while it still changes knobs."""
        return self.state in ("running", "restoring")

    @property
    def sends_requests(self) -> bool:
        """True while it, or a sample load, sends requests of its own."""
        return self.under_way or self.load_clients > 0


class TuningLink(Protocol):
    """Tuning, for a screen. Coroutines raise engine.errors.EngineError."""

    def report(self) -> TuningReport:
        """How the last one goes or went, at once."""

    async def start(self, order: TuneOrder) -> None:
        """Begin; returns once it has. Raises EngineBusy while another goes on, NoModelLoaded, InvalidRequest."""

    async def start_load(self, model: str = "", seconds: LoadSeconds = LOAD_S) -> None:
        """Send short requests for a while, two clients for each slot, behind all others; returns once it has begun.

        Raises EngineBusy while it, a bench or a search runs, and what Engine.serving does where no model answers.
        """

    async def stop_load(self) -> None:
        """Send nothing more; the last requests end by themselves. Nothing happens where none runs."""

    async def cancel(self) -> None:
        """End it and put everything back; returns when that is done. Nothing happens where none goes on."""

    async def use_best(self) -> None:
        """Put the engine to the best setting of the last one, and start with it from now on.

        Raises InvalidRequest where there is none or it breaks what is asked of latency, EngineBusy while one goes on,
        EngineError where it cannot be kept for the next start.
        """
