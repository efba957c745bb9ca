"""Who asks, from the flags: the demand, what of it is counted, and both in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from engine.errors import InvalidRequest
from engine.simulation.demand import ClosedDemand, Demand, Mix, OpenDemand, TraceDemand
from engine.simulation.lengths import Length
from engine.simulation.outcome import WHOLE, Window

_USERS = 100
_DURATION_S, _SHORT_DURATION_S = 120.0, 60.0
_MANY = 2000
"""Requests within the short duration that make it long enough."""
_WARM_UP, _DEFAULT_WARM_UP_S = 0.25, 30.0
"""Share of a given duration, and seconds of a default one, in which workers fill and nothing counts yet."""
_RAMP = 2 / 3
"""Of the warm-up: users begin in it."""
_LOOKED_AT = 10_000
"""Requests that are enough to know their lengths by."""


@dataclass(frozen=True, slots=True)
class RequestedDemand:
    """Who asks.

    of: the demand, multiplied by a factor, with requests for a number of seconds.  duration_s: for how long they come.
    window: which of them count.  traced: they are as they came once, neither more nor for longer.
    """

    of: Callable[[float, float], Demand]
    duration_s: float
    window: Window
    words: str
    traced: bool = False

    def demand(self, strength: float) -> Demand:
        """Return the demand multiplied by `strength`."""
        return self.of(strength, self.duration_s)

    def longer_share(self, tokens: int) -> float:
        """The share of requests whose prompt and answer have more tokens than that together; 0 where that is 0."""
        asks = list(islice(self.demand(1.0).first(), _LOOKED_AT))
        longer = sum(ask.prompt_tokens + ask.output_tokens > tokens for ask in asks)
        return longer / len(asks) if asks and tokens else 0.0

    def lasting(self, until_s: float) -> RequestedDemand:
        """The same with requests until then at least, where there can be more."""
        if self.traced or until_s <= self.duration_s:
            return self
        return replace(self, duration_s=until_s, window=Window(since_s=self.window.since_s, until_s=until_s))


def demand_from_flags(given: argparse.Namespace) -> RequestedDemand:
    """As the flags say. Raises InvalidRequest, also where no request would count."""
    if sum(each is not None for each in (given.users, given.rate, given.trace)) > 1:
        raise InvalidRequest("give only one of --users, --rate and --trace", param="users")
    if given.duration is not None and not given.duration > 0:
        raise InvalidRequest("--duration is 0 s; it must be above 0", param="duration")
    if given.trace is not None:
        return _by_trace(given)
    mix = _mix(given)
    found = _demand_of(given, mix)
    many = _SHORT_DURATION_S * found(1.0, _SHORT_DURATION_S).offered_per_s(0.0) >= _MANY
    duration_s = given.duration or (_SHORT_DURATION_S if many else _DURATION_S)
    window = Window(since_s=_warm_up_s(given), until_s=duration_s)
    if given.rate is not None and all(ask.at_s < window.since_s for ask in found(1.0, duration_s).first()):
        raise InvalidRequest(
            f"at {given.rate:g} requests/s none arrives between {window.since_s:g} and {window.until_s:g} s, the "
            "measured part: use a longer --duration",
            param="duration",
        )
    tokens = f"prompts of {mix.prompt.expected:g} and answers of {mix.output.expected:g} tokens{_prefixed(mix)}"
    return RequestedDemand(found, duration_s, window, f"{_whom(given)}, {tokens}")


def _warm_up_s(given: argparse.Namespace) -> float:
    return _DEFAULT_WARM_UP_S if given.duration is None else _WARM_UP * given.duration


def _whom(given: argparse.Namespace) -> str:
    if given.rate is not None:
        return f"{given.rate:g} requests/s"
    return f"{given.users or _USERS} users, think time {given.think:g} s"


def _prefixed(mix: Mix) -> str:
    if not mix.shared:
        return ""
    return f", {mix.shared:.0%} with one of {mix.groups} prefixes of {mix.shared_tokens} tokens"


def _mix(given: argparse.Namespace) -> Mix:
    if given.shared > 1:
        raise InvalidRequest(f"--shared is {given.shared:g}; max 1", param="shared")
    return Mix(
        prompt=Length.parse(given.prompt, "prompt"),
        output=Length.parse(given.output, "output"),
        shared=given.shared,
        groups=given.prefixes,
        shared_tokens=given.shared_tokens if given.shared else 0,
    )


def _demand_of(given: argparse.Namespace, mix: Mix) -> Callable[[float, float], Demand]:
    users, ramp_s = given.users or _USERS, _RAMP * _warm_up_s(given)

    def demand(strength: float, duration_s: float) -> Demand:
        if given.rate is not None:
            rate_per_s = strength * given.rate
            return OpenDemand(mix, rate_per_s=rate_per_s, duration_s=duration_s, cv=given.burstiness, seed=given.seed)
        count = max(1, round(strength * users))
        return ClosedDemand(
            mix, users=count, think_s=given.think, duration_s=duration_s, ramp_s=ramp_s, seed=given.seed
        )

    return demand


def _by_trace(given: argparse.Namespace) -> RequestedDemand:
    """All of a trace, or of its beginning: it says itself when requests come, so all of them count."""
    whole = TraceDemand.read(given.trace)
    trace = whole.before(math.inf if given.duration is None else given.duration)
    words = f"{len(trace)} requests of {given.trace}, within {trace.last_s:g} s"
    if len(trace) < len(whole):
        words = (
            f"the first {given.duration:g} s of {given.trace}: {len(trace)} of {len(whole)} requests "
            f"(--duration leaves out the rest, until {whole.last_s:g} s)"
        )
    return RequestedDemand(lambda strength, duration_s: trace, trace.last_s, WHOLE, words, traced=True)
