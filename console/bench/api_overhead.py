"""What the API costs: a server on one core whose backend costs nothing, and clients on the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from console.bench.http_clients import Seen, ask
from console.bench.http_server import Order, Pace, ServerProcess
from console.bench.plan import Spread
from console.bench.progress import Show
from console.bench.text import table

SHORT_GOAL = 1500
STREAM_GOAL = 20_000
SHORT_TOKENS = 1
SHORT_CLIENTS = 32
SHORT_REQUESTS = 1000
ALONE_REQUESTS = 200
STREAMS = (32, 128)
STREAMED_TOKENS = 16_384
PACE_S = 0.02
PACED_STEPS = 50


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the server did as often as it could. per_s: on the wall; cpu_us: of the server's process for each.

    per_cpu_s: how many one core has time for.  goal: how many those should be, None where none is set.
    """

    name: str
    per_s: Spread
    cpu_us: Spread
    per_cpu_s: float
    goal: float | None = None

    @property
    def met(self) -> bool:
        """Whether the core does as many, on the wall: what the client's own core could not take counts against it."""
        return self.goal is None or self.per_s.median >= self.goal


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """What the API adds to the time that something takes, in milliseconds."""

    name: str
    p50_ms: float
    p99_ms: float


class HttpReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of rounds. server_core: where nobody else was, None where none could be left to it.

    chunks_per_token: 1 where every token of a stream came in an event of its own.
    """

    server_core: int | None
    rounds: int
    rates: tuple[Rate, ...]
    late: tuple[Late, ...]
    chunks_per_token: float


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round saw, of how many things, in how much time."""

    seen: Seen
    seconds: float
    cpu_s: float


async def measure_http(
    model: str, rounds: int, show: Show, *, profile: str = "", access_log: str = "", scale: float = 1.0
) -> HttpReport:
    """Run rounds of each kind by turns, after one of each that does not count. scale: of what a round does.

    Raises EngineError.
    """
    found: dict[str, list[_Round]] = {}
    show("starting the server")
    with _core_left() as core:
        order = Order(model=model, core=core, profile=profile, access_log=access_log)
        async with ServerProcess(order) as server:
            for number in range(rounds + 1):
                show(f"round {number} of {rounds}" if number else "warming up")
                for kind in _kinds(scale):
                    found.setdefault(kind.name, []).append(await kind.run(server))
    return _report(core, rounds, {name: each[1:] for name, each in found.items()})


@dataclass(frozen=True, slots=True)
class _Kind:
    """One thing that is measured."""

    name: str
    clients: int
    requests: int
    max_tokens: int
    pace_s: float = 0.0

    @property
    def streams(self) -> bool:
        return self.max_tokens > SHORT_TOKENS

    async def run(self, server: ServerProcess) -> _Round:
        """One round."""
        before, began_s = await server.go_on(Pace(self.pace_s)), time.monotonic()
        seen = await ask(server.port, self.clients, self.requests, max_tokens=self.max_tokens, stream=self.streams)
        seconds = time.monotonic() - began_s
        after = await server.go_on(Pace(0.0))
        return _Round(seen, seconds, after.cpu_s - before.cpu_s)


_SHORT = f"short requests, {SHORT_CLIENTS} clients"
_ALONE = "short request, one client"


def _streamed(streams: int) -> str:
    return f"streamed tokens, {streams} streams"


def _paced(streams: int) -> str:
    return f"token, {streams} streams of {1 / PACE_S:.0f} a second"


def _kinds(scale: float) -> Iterable[_Kind]:
    yield _Kind(_SHORT, SHORT_CLIENTS, max(SHORT_CLIENTS, int(scale * SHORT_REQUESTS)), SHORT_TOKENS)
    for streams in STREAMS:
        yield _Kind(_streamed(streams), streams, streams, max(2, int(scale * STREAMED_TOKENS) // streams))
    yield _Kind(_ALONE, 1, max(10, int(scale * ALONE_REQUESTS)), SHORT_TOKENS)
    for streams in STREAMS:
        yield _Kind(_paced(streams), streams, streams, max(2, int(scale * PACED_STEPS)), PACE_S)


def _report(core: int | None, rounds: int, found: dict[str, list[_Round]]) -> HttpReport:
    streamed = [each for streams in STREAMS for each in found[_streamed(streams)]]
    return HttpReport(
        server_core=core,
        rounds=rounds,
        rates=(
            _rate(_SHORT, found[_SHORT], [len(each.seen.took_s) for each in found[_SHORT]], SHORT_GOAL),
            *(
                _rate(name, found[name], [each.seen.tokens for each in found[name]], STREAM_GOAL)
                for name in map(_streamed, STREAMS)
            ),
        ),
        late=(
            _late(_ALONE, [took for each in found[_ALONE] for took in each.seen.took_s]),
            *(
                _late(name, [late for each in found[name] for late in each.seen.late_s])
                for name in map(_paced, STREAMS)
            ),
        ),
        chunks_per_token=sum(each.seen.chunks for each in streamed) / sum(each.seen.tokens for each in streamed),
    )


def _rate(name: str, rounds: list[_Round], counts: list[int], goal: float) -> Rate:
    cpu_us = Spread.of(1e6 * each.cpu_s / count for each, count in zip(rounds, counts, strict=True))
    return Rate(
        name=name,
        per_s=Spread.of(count / each.seconds for each, count in zip(rounds, counts, strict=True)),
        cpu_us=cpu_us,
        per_cpu_s=1e6 / cpu_us.median,
        goal=goal,
    )


def _late(name: str, seconds: list[float]) -> Late:
    ordered = sorted(seconds)
    return Late(
        name=name, p50_ms=1e3 * ordered[len(ordered) // 2], p99_ms=1e3 * ordered[int(0.99 * (len(ordered) - 1))]
    )


@contextmanager
def _core_left() -> Iterator[int | None]:
    """A core for the server, to which the clients, who are this process, leave it meanwhile. None where there is but
    one, or no way to say so."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) < 2:
        yield None
        return
    os.sched_setaffinity(0, cores - {max(cores)})
    try:
        yield max(cores)
    finally:
        os.sched_setaffinity(0, cores)


def http_text(report: HttpReport) -> str:
    """The report for a person."""
    rates = [
        [
            rate.name,
            f"{rate.per_s.median:.0f}/s",
            f"{rate.per_s.least:.0f} to {rate.per_s.most:.0f}",
            f"{rate.cpu_us.median:.1f} us",
            f"{rate.per_cpu_s:.0f}/s",
            "" if rate.goal is None else f"{rate.goal:.0f}/s",
            "yes" if rate.met else "NO",
        ]
        for rate in report.rates
    ]
    late = [[each.name, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms"] for each in report.late]
    where = "no core of its own" if report.server_core is None else f"core {report.server_core}, clients on the others"
    return "\n".join(
        (
            f"A server on {where}; {report.rounds} rounds, {report.chunks_per_token:.2f} chunks for each token",
            "",
            table(["", "median", "least to most", "server's CPU each", "a core has time for", "goal", "met"], rates),
            "",
            table(["added to", "p50", "p99"], late),
        )
    )
