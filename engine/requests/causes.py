"""Why a request took as long as it did: every second of it has one cause, and the causes add up to its latency.

The engine knows what a request waited for before a worker had it, the worker what others took of its steps; what
remains of its time on a worker is the work on its own prompt and answer. Pure: every call gets the time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import msgspec

from engine.backends.base import TimeLost
from engine.config import EngineConfig
from engine.text.printable import format_seconds

Cause = Literal[
    "prepare",
    "slot",
    "pages",
    "step_tokens",
    "prompts",
    "preempted",
    "slow_worker",
    "client",
    "grammar",
    "load",
    "swap",
    "lost_worker",
    "prefill",
    "decode",
]

OWN_WORK: frozenset[Cause] = frozenset({"prefill", "decode"})


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by cause, the largest first; they add up to total_s. Of one request that is its latency, from when it
    arrived until its client had read the end of it, of several the sum of their time.

    behind: the request whose prompt took most of what prompts of others took, "" for none.  sentence: the largest cause
    that can be avoided, and what to change; "" where there is none.
    """

    total_s: float = 0.0
    causes: dict[Cause, float] = {}
    behind: str = ""
    sentence: str = ""


class WaitClock:
    """Seconds that requests in one queue waited, by reason. They only grow."""

    def __init__(self, now: float) -> None:
        self._reason: Cause = "slot"
        self._since = now
        self._seconds: defaultdict[Cause, float] = defaultdict(float)

    @property
    def reason(self) -> Cause:
        """The cause that they wait for now."""
        return self._reason

    def turn(self, now: float, reason: Cause) -> None:
        """They wait for this from now on."""
        self._seconds[self._reason] += now - self._since
        self._reason, self._since = reason, now

    def read(self, now: float) -> defaultdict[Cause, float]:
        """The seconds until now."""
        self.turn(now, self._reason)
        return self._seconds.copy()


@dataclass(slots=True)
class TimeLedger:
    """The time of one request. It is prepared, then waits in queues and has stays on workers, in turn.

    slow_s: how many seconds its worker has lost so far by being slower than its peers (`Router.slow_s`).
    """

    seconds: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    behind: str = ""
    knobs: Mapping[str, int] = field(default_factory=dict)
    _clock: WaitClock | None = None
    _marks: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    _since: float | None = None
    _stays: bool = False
    _lost: bool = False
    _first: float | None = None
    _slow_mark: float = 0.0
    _worker: TimeLost = field(default_factory=TimeLost)
    _counted: Mapping[Cause, float] = field(default_factory=dict)

    def enter(self, now: float, clock: WaitClock) -> None:
        """It waits in the queue of this clock. What it waited elsewhere, between two models, was for the swap."""
        if self._stays:
            self.left(now)
        elif self._since is not None and self._clock is not None:
            self.seconds["lost_worker" if self._lost else "swap"] += now - self._since
        self._since, self._clock, self._marks = now, clock, clock.read(now)

    def prepared(self, arrived: float, now: float) -> None:
        """It was submitted. What it did not wait for since it arrived went into its prompt."""
        self.seconds["prepare"] += max(0.0, now - arrived - sum(self.seconds.values()))

    def dispatched(self, now: float, slow_s: float = 0.0) -> None:
        """A worker has it."""
        self._charge_wait(now)
        self._since, self._clock, self._stays, self._worker = now, None, True, TimeLost()
        self._slow_mark = slow_s

    def got_tokens(self, now: float) -> None:
        """Tokens came. After the loss of a worker, all until then went into getting back to where it was."""
        if self._first is None:
            self._first = now
        if self._lost and self._stays and self._since is not None:
            self.seconds["lost_worker"] += now - self._since
            self._since, self._lost = now, False

    def worker_reported(self, lost: TimeLost) -> None:
        """Keep the seconds that it lost so far, of its stay on its worker."""
        self._worker = lost

    def left(self, now: float, slow_s: float = 0.0, *, lost: bool = False) -> None:
        """Its worker has it no more, or it ended."""
        if self._stays:
            self._charge_stay(now, slow_s)
        else:
            self._charge_wait(now)
        self._since, self._clock, self._stays = None, None, False
        self._lost = self._lost or lost

    def read_to_end(self, waited_s: float) -> None:
        """Its client had read the end so long after it came, as far as is known by now."""
        self.seconds["client"] = waited_s

    def why(self, now: float, slow_s: float = 0.0) -> Why:
        """Return what its time went into until now, or until its end."""
        so_far = self._so_far(now, slow_s)
        return describe(so_far.seconds, so_far.behind, self.knobs)

    def count(self, now: float, slow_s: float = 0.0) -> dict[Cause, float]:
        """Return the seconds since the last call. Negative for what another cause turned out to account for."""
        seconds, counted = self.seconds if self._since is None else self._so_far(now, slow_s).seconds, self._counted
        self._counted = seconds.copy()
        return {cause: more for cause, spent in seconds.items() if (more := spent - counted.get(cause, 0.0))}

    def _so_far(self, now: float, slow_s: float) -> TimeLedger:
        """Return what it would be if the request ended now."""
        so_far = TimeLedger(
            self.seconds.copy(),
            self.behind,
            self.knobs,
            self._clock,
            self._marks,
            self._since,
            self._stays,
            self._lost,
            self._first,
            self._slow_mark,
            self._worker,
        )
        so_far.left(now, slow_s)
        return so_far

    def _charge_wait(self, now: float) -> None:
        if self._since is None or self._clock is None:
            return
        if self._lost:
            self.seconds["lost_worker"] += now - self._since
            return
        for cause, seconds in self._clock.read(now).items():
            if (waited_s := seconds - self._marks[cause]) > 0:
                self.seconds[cause] += waited_s

    def _charge_stay(self, now: float, slow_s: float) -> None:
        """Charge what the worker reported, scaled down where clocks differ, and the rest as its own work."""
        assert self._since is not None
        stay_s = max(0.0, now - self._since)
        if self._lost:
            self.seconds["lost_worker"] += stay_s
            return
        reported = self._worker.seconds
        scale = min(1.0, stay_s / total) if (total := sum(reported.values())) > 0 else 0.0
        before_s = 0.0
        for name, seconds in reported.items():
            self.seconds[_WORKERS_CAUSES.get(name, "prefill")] += seconds * scale
            before_s += 0.0 if name in ("prompts", "preempted") else seconds * scale
        rest_s = stay_s - total * scale
        until_first_s = stay_s if self._first is None else max(0.0, self._first - self._since)
        prefill_s = min(rest_s, max(0.0, until_first_s - before_s))
        share = min(1.0, max(0.0, slow_s - self._slow_mark) / stay_s) if stay_s > 0 else 0.0
        self.seconds["slow_worker"] += rest_s * share
        self.seconds["prefill"] += prefill_s * (1 - share)
        self.seconds["decode"] += (rest_s - prefill_s) * (1 - share)
        if self._worker.behind:
            self.behind = self._worker.behind.rpartition("#")[0] or self._worker.behind


_WORKERS_CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        "slot": "slot",
        "pages": "pages",
        "step_tokens": "step_tokens",
        "prompts": "prompts",
        "prefill_prompts": "prompts",
        "preempted": "preempted",
        "grammar": "grammar",
    }
)


WINDOW_S = 60
"""Seconds over which the time of all requests is summed."""


class CauseWindow:
    """Seconds of all requests by cause over the last minute, together and by worker. They change with `tick` alone."""

    def __init__(self) -> None:
        self._sums: dict[str, defaultdict[Cause, float]] = {"": defaultdict(float)}
        self._past: deque[dict[str, dict[Cause, float]]] = deque(maxlen=WINDOW_S + 1)

    def add(self, seconds: Mapping[Cause, float], worker: str | None = None) -> None:
        """Add seconds of a request. worker: the one that had it; None while it waited for one."""
        for sums in (self._sums[""], *([self._sums.setdefault(worker, defaultdict(float))] if worker else ())):
            for cause, more in seconds.items():
                sums[cause] += more

    def tick(self, workers: Collection[str]) -> None:
        """End a second. workers: those that there are; others are forgotten."""
        self._sums = {name: sums for name, sums in self._sums.items() if not name or name in workers}
        self._past.append({name: dict(sums) for name, sums in self._sums.items()})

    def recent(self, worker: str = "") -> dict[Cause, float]:
        """Return the seconds of the last minute, of one worker or of all."""
        if not self._past:
            return {}
        before = self._past[0].get(worker, {})
        now = self._past[-1].get(worker, {})
        return {cause: more for cause, spent in now.items() if (more := spent - before.get(cause, 0.0)) > 0}


def knobs_of(config: EngineConfig) -> dict[str, int]:
    """The settings that sentences about causes name: max_prompts, step_tokens, and itl_target_us where there is one."""
    knobs = {"max_prompts": config.max_prompts, "step_tokens": config.step_tokens}
    return knobs | ({} if config.slo_itl_s is None else {"itl_target_us": round(config.slo_itl_s * 1e6)})


def describe(seconds: Mapping[Cause, float], behind: str = "", knobs: Mapping[str, int] = MappingProxyType({})) -> Why:
    """The causes of a request's time, largest first, and the sentence about them. knobs: as `knobs_of` has them."""
    return _why(seconds, 0, behind, knobs)


def describe_all(seconds: Mapping[Cause, float], knobs: Mapping[str, int] = MappingProxyType({})) -> Why:
    """The causes of the time of several requests, as `describe` has those of one."""
    return _why(seconds, 1, "", knobs)


_MIN_SHARE = 0.05
"""There is no sentence about what took less of the time."""


def _why(seconds: Mapping[Cause, float], number: int, behind: str, knobs: Mapping[str, int]) -> Why:
    """number: which sentence, that about one request or about several."""
    causes = {cause: spent for cause, spent in sorted(seconds.items(), key=lambda each: -each[1]) if spent > 0}
    total_s = sum(causes.values())
    largest = next((cause for cause in causes if cause not in OWN_WORK), None)
    sentence = ""
    if largest is not None and causes[largest] >= _MIN_SHARE * total_s:
        now = {name: f" (now {knobs[name]:,})" if name in knobs else "" for name in ("max_prompts", "step_tokens")}
        target_us, step_tokens = knobs.get("itl_target_us"), now.pop("step_tokens")
        target = "" if target_us is None else f"slo_itl (now {format_seconds(target_us / 1e6)})"
        now["pace"] = target or f"step tokens{step_tokens}"
        spent = f"{format_seconds(causes[largest])} ({causes[largest] / total_s:.0%})"
        whose = f", mostly of {behind}" if behind else ""
        sentence = (_SENTENCES[largest][number] + _SENTENCES[largest][2]).format(spent=spent, whose=whose, **now)
    return Why(total_s=total_s, causes=causes, behind=behind, sentence=sentence)


_SENTENCES: Mapping[Cause, tuple[str, str, str]] = MappingProxyType(
    {
        "prepare": (
            "Spent {spent} on preparing the prompt",
            "Requests spent {spent} on preparing their prompts",
            ": shorten prompts and schemas, or check the network.",
        ),
        "slot": (
            "Waited {spent} for a slot",
            "Requests waited {spent} for a slot",
            ": raise max prompts{max_prompts}.",
        ),
        "pages": (
            "Waited {spent} for KV pages",
            "Requests waited {spent} for KV pages",
            ": raise KV cache tokens, or lower max prompts{max_prompts}.",
        ),
        "step_tokens": (
            "Waited {spent} for other prompts to be computed{whose}",
            "Requests waited {spent} for other prompts to be computed",
            ": add workers, or raise {pace}.",
        ),
        "prompts": (
            "Shared steps with the prompts of other requests for {spent}{whose}",
            "Requests shared steps with the prompts of other requests for {spent}",
            ": lower {pace}.",
        ),
        "preempted": (
            "Was preempted for {spent} for lack of KV pages",
            "Requests were preempted for {spent} for lack of KV pages",
            ": raise KV cache tokens, or lower max prompts{max_prompts}.",
        ),
        "slow_worker": (
            "Lost {spent} on a worker slower than its peers",
            "Requests lost {spent} on a worker slower than its peers",
            ": restart that worker, or check its device.",
        ),
        "client": (
            "Waited {spent} for the client to read the answer",
            "Requests waited {spent} for clients to read answers",
            ": check the client and the network.",
        ),
        "grammar": (
            "Waited {spent} for its grammar to compile",
            "Requests waited {spent} for grammars to compile",
            ": simplify the grammar, or reuse the same one.",
        ),
        "load": (
            "Waited {spent} for the model to load",
            "Requests waited {spent} for a model to load",
            ": raise the idle unload time, or keep it loaded.",
        ),
        "swap": (
            "Waited {spent} for the model to be replaced",
            "Requests waited {spent} for a model to be replaced",
            ": replace it while it is idle, or where both models fit in memory.",
        ),
        "lost_worker": (
            "Lost {spent} with its worker",
            "Requests lost {spent} with a worker",
            ": see the log for the cause.",
        ),
    }
)
"""Of each cause that can be avoided: what it did to one request, what to several, and what to change."""
