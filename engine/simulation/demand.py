"""Demand: arrival processes, lengths, shared prefixes. Seeded, so the same in every run."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Protocol

import msgspec

from engine.errors import InvalidRequest
from engine.simulation.lengths import Length

_SHORTEST_S = 1e-3
"""Between two requests of a user: one that is refused at once is not sent again in the same moment."""
_COLUMNS = ("at_s", "prompt_tokens", "output_tokens")


def gap_s(source: random.Random, rate_per_s: float, shape: float) -> float:
    """Seconds until the next arrival, gamma-distributed: with shape 1 arrivals are a Poisson process, with less they
    are burstier; the coefficient of variation is 1 / sqrt(shape). Benches and simulations draw from it alike."""
    return source.gammavariate(shape, 1 / (shape * rate_per_s))


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client sends it: when, and how long it and its answer are.

    group: requests of the same group begin with the same `shared_tokens` tokens; -1 is no group.
    client: the unit of fair shares in the queue.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    group: int = -1
    shared_tokens: int = 0
    client: str = ""


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of requests. shared: the share of them that begin with one of `groups` prefixes of `shared_tokens`."""

    prompt: Length
    output: Length
    shared: float = 0.0
    groups: int = 1
    shared_tokens: int = 0

    def ask(self, at_s: float, source: random.Random, client: str = "") -> Ask:
        """One request."""
        prompt, output = self.prompt.draw(source), self.output.draw(source)
        group, shared_tokens = -1, 0
        if self.shared_tokens and source.random() < self.shared:
            group, shared_tokens = source.randrange(self.groups), self.shared_tokens
        return Ask(
            at_s=at_s,
            prompt_tokens=shared_tokens + prompt,
            output_tokens=output,
            group=group,
            shared_tokens=shared_tokens,
            client=client,
        )


class Demand(Protocol):
    """The clients of the cluster."""

    def first(self) -> Iterator[Ask]:
        """Return the requests that come whatever is answered, in order of time."""

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Return the next request of its client, now that `ask` has ended."""

    def offered_per_s(self, request_s: float) -> float:
        """Return how many requests come a second, on average, where each takes `request_s` seconds."""


class OpenDemand:
    """Requests that come whether or not others are answered. cv: of the time between two of them: 1 is Poisson, more is
    burstier (gamma), 0 is a clock. Ends after duration_s."""

    def __init__(self, mix: Mix, *, rate_per_s: float, duration_s: float, cv: float = 1.0, seed: int = 0) -> None:
        if not 0 < rate_per_s <= 10**6:
            raise InvalidRequest(f"the rate is {rate_per_s:g} requests/s; it must be above 0", param="rate")
        if not 0 <= cv <= 100:
            raise InvalidRequest(f"burstiness is {cv:g}; it must be between 0 and 100", param="burstiness")
        self._mix, self._rate, self._duration_s, self._cv, self._seed = mix, rate_per_s, duration_s, cv, seed

    def first(self) -> Iterator[Ask]:
        """Demand: all of them."""
        gaps, lengths = random.Random(f"gaps {self._seed}"), random.Random(f"lengths {self._seed}")
        now = 0.0
        while True:
            now += self._gap(gaps)
            if now >= self._duration_s:
                return
            yield self._mix.ask(now, lengths)

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Demand: nothing."""
        return None

    def offered_per_s(self, request_s: float) -> float:
        """Demand: the rate."""
        return self._rate

    def _gap(self, source: random.Random) -> float:
        return gap_s(source, self._rate, 1 / self._cv**2) if self._cv else 1 / self._rate


class ClosedDemand:
    """Users who read and think for think_s on average (exponential) before each request, and send one at a time.
    They come evenly within ramp_s, and then send their first."""

    def __init__(
        self, mix: Mix, *, users: int, think_s: float, duration_s: float, ramp_s: float = 0.0, seed: int = 0
    ) -> None:
        if not 0 < users <= 10**7:
            raise InvalidRequest(f"users is {users}; it must be at least 1", param="users")
        if not 0 <= think_s < math.inf:
            raise InvalidRequest(f"the think time is {think_s:g} s; it must not be negative", param="think")
        self._mix, self._users, self._think_s, self._duration_s = mix, users, think_s, duration_s
        self._ramp_s = ramp_s
        self._source = random.Random(f"users {seed}")

    def first(self) -> Iterator[Ask]:
        """Demand: everybody's first request."""
        starts = sorted(self._source.uniform(0, self._ramp_s) for _ in range(self._users))
        for user, at_s in enumerate(starts):
            if at_s < self._duration_s:
                yield self._mix.ask(at_s, self._source, f"user {user}")

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Demand: the same user's next one, unless time is over."""
        at_s = max(now + self._think(), ask.at_s + _SHORTEST_S)
        return self._mix.ask(at_s, self._source, ask.client) if at_s < self._duration_s else None

    def offered_per_s(self, request_s: float) -> float:
        """Demand: one of each user, whenever that has thought and been answered."""
        return self._users / max(self._think_s + request_s, _SHORTEST_S)

    def _think(self) -> float:
        return self._source.expovariate(1 / self._think_s) if self._think_s else 0.0


class SeriesDemand:
    """Requests one after the other, each sent when the one before has ended: none waits for another."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._asks = iter(asks)

    def first(self) -> Iterator[Ask]:
        """Demand: the first of them, at once."""
        for ask in islice(self._asks, 1):
            yield msgspec.structs.replace(ask, at_s=0.0)

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Demand: the next."""
        following = next(self._asks, None)
        return None if following is None else msgspec.structs.replace(following, at_s=now)

    def offered_per_s(self, request_s: float) -> float:
        """Demand: one at a time."""
        return 1 / max(request_s, _SHORTEST_S)


class ShorterDemand:
    """The requests of another demand that come before `until_s`."""

    def __init__(self, demand: Demand, until_s: float) -> None:
        self._demand, self._until_s = demand, until_s

    def first(self) -> Iterator[Ask]:
        """Demand: the first of them."""
        return takewhile(lambda ask: ask.at_s < self._until_s, self._demand.first())

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Demand: the next, unless time is over."""
        following = self._demand.answered(ask, now)
        return following if following is not None and following.at_s < self._until_s else None

    def offered_per_s(self, request_s: float) -> float:
        """Demand: as the other one."""
        return self._demand.offered_per_s(request_s)


class TraceDemand:
    """Requests as they came once."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = sorted(asks, key=lambda ask: ask.at_s)

    @classmethod
    def read(cls, path: Path) -> TraceDemand:
        """A CSV file with the columns at_s, prompt_tokens and output_tokens; at_s counts from any moment, and the first
        request is put at 0. Raises InvalidRequest, naming the line."""
        try:
            with path.open(newline="", encoding="utf-8-sig") as lines:
                rows = csv.DictReader(lines, strict=True, skipinitialspace=True)
                if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
                    raise InvalidRequest(f"{path} lacks the column {missing[0]}", param="trace")
                asks = [_traced(path, rows.line_num, row) for row in rows]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InvalidRequest(f"{path} could not be read: {error}", param="trace") from error
        if not asks:
            raise InvalidRequest(f"{path} has no requests", param="trace")
        began_s = min(ask.at_s for ask in asks)
        return cls([msgspec.structs.replace(ask, at_s=ask.at_s - began_s) for ask in asks])

    def __len__(self) -> int:
        """How many there are."""
        return len(self._asks)

    @property
    def last_s(self) -> float:
        """When the last one comes; 0 where there is none."""
        return self._asks[-1].at_s if self._asks else 0.0

    def before(self, duration_s: float) -> TraceDemand:
        """Those of them that come before then."""
        return TraceDemand([ask for ask in self._asks if ask.at_s < duration_s])

    def first(self) -> Iterator[Ask]:
        """Demand: all of them."""
        return iter(self._asks)

    def answered(self, ask: Ask, now: float) -> Ask | None:
        """Demand: nothing."""
        return None

    def offered_per_s(self, request_s: float) -> float:
        """Demand: the mean rate."""
        return len(self._asks) / max(self.last_s, 1.0)


def _traced(path: Path, number: int, row: dict[str, str]) -> Ask:
    try:
        at_s, prompt, output = float(row["at_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"line {number} of {path} is not a time and two numbers of tokens", param="trace"
        ) from None
    if not (math.isfinite(at_s) and prompt >= 1 and output >= 1):
        raise InvalidRequest(f"line {number} of {path} has a time or a number of tokens out of range", param="trace")
    return Ask(at_s=at_s, prompt_tokens=prompt, output_tokens=output)
