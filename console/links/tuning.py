"""`link.tuning`: what is tried to find the best settings of a model, and how that goes."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec

from console.autotune.record import Verdict
from console.autotune.space import LEAST_CACHE_BITS, KnobName, Setting

TuningState = Literal["none", "running", "restoring", "done", "cancelled", "failed"]
MAX_MINUTES = 24 * 60.0


class TuneOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be found. model: by its name, "" is the first one.

    slo_ttft_s, slo_itl_s: None takes those of the settings; percentile: of first tokens and gaps that must keep them.
    users: clients at once; as many as there are places if None.  knobs: those that may be turned, all if empty.
    least_cache_bits: of the KV cache.  apply: leave the engine at the winner, and start with it from now on.
    """

    model: str = ""
    minutes: Annotated[float, msgspec.Meta(gt=0, le=MAX_MINUTES)] = 10.0
    slo_ttft_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    slo_itl_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=100)] = 95.0
    users: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    knobs: tuple[KnobName, ...] = ()
    least_cache_bits: int = LEAST_CACHE_BITS
    apply: bool = False
    seed: int = 0


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was tried. low, high: where its tokens/s lie with 95% confidence.

    front: nothing beats it in both tokens/s and ITL.  best: it is the one to be used, as far as is known.
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
    front: bool = False
    best: bool = False


class TuningReport(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes. stage: of the search, "coarse", "fine", "wide" or "final".  mix: what requests are like, in words.

    now: the setting that is tried.  refused: settings for which there was not the memory.  size: of the whole grid.
    said: why it failed, or what came of it, in a sentence.
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
    tried: tuple[Tried, ...] = ()
    applied: bool = False
    said: str = ""

    @property
    def best(self) -> Tried | None:
        """The setting to be used."""
        return next((each for each in self.tried if each.best), None)

    @property
    def under_way(self) -> bool:
        """Whether it still turns knobs."""
        return self.state in ("running", "restoring")


class TuningLink(Protocol):
    """What a screen asks about tuning. Coroutines raise engine.errors.EngineError."""

    def report(self) -> TuningReport:
        """How the last one goes or went, at once."""

    async def start(self, order: TuneOrder) -> None:
        """Begin; returns once it has. Raises EngineBusy while another goes on, NoModelLoaded, InvalidRequest."""

    async def cancel(self) -> None:
        """End it and put everything back; returns when that is done. Nothing happens where none goes on."""

    async def use_best(self) -> None:
        """Put the engine to the best setting of the last one, and start with it from now on.

        Raises InvalidRequest where there is none, EngineBusy while one goes on.
        """
