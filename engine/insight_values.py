"""What insight tells, as the values a Snapshot carries. Times are seconds, rates per second; None is "not known"."""

from __future__ import annotations

import msgspec

from engine.backends.base import DraftPosition


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
    per_s: those that kept it, over the last minute.
    """

    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    judged: int = 0
    kept: int = 0
    per_s: float = 0.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What was done since `since` (unix time), when the engine started or an operator began to count anew.

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
    """What the devices draw that workers are on. power_w: None where none of them tells.

    unmetered: devices with workers that do not tell.  busy_joules: of the session, while a worker computed.
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
    """What models ask of a device over the last seconds, and the most that it can; None where that is not known."""

    device: str
    flops_per_s: float = 0.0
    flops_limit_per_s: float | None = None
    bytes_per_s: float = 0.0
    bytes_limit_per_s: float | None = None


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """Where time, tokens and energy go, over the session; brought up to date once a second.

    queue, prefill, decode: seconds, of whole answers.  longest_context_tokens: prompt and answer of the longest request
    that ended.  configured_context_tokens: what the models take at most, 0 where none is loaded.
    finished: requests by finish reason.  drafts: by position; () where no backend tells.
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
