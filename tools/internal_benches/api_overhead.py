"""The cost of the API: a server on one core with a backend that costs nothing, and clients on the other cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from console.bench.progress import Show
from console.bench.text import table
from tools.internal_benches.http_clients import ClientMeasurements, send_completions
from tools.internal_benches.http_server import Pace, ServerOptions, ServerProcess
from tools.internal_benches.rounds import Spread

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


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests or tokens per second at full load. per_s: by the wall clock.  cpu_us: CPU time of the server per item.

    per_cpu_s: items that one core has time for.  goal: minimum of per_s, None where none is set.
    """

    name: str
    per_s: Spread
    cpu_us: Spread
    per_cpu_s: float
    goal: float | None = None

    @property
    def reaches_goal(self) -> bool:
        """True if the goal is reached by the wall clock, so clients that are too slow count against the server."""
        return self.goal is None or self.per_s.median >= self.goal


class AddedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds that the API adds."""

    name: str
    p50_ms: float
    p99_ms: float


class HttpReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over rounds. server_core: reserved for the server, None where no core could be reserved.

    chunks_per_token: 1 where every token of a stream arrives in its own event.
    """

    server_core: int | None
    rounds: int
    rates: tuple[Throughput, ...]
    late: tuple[AddedLatency, ...]
    chunks_per_token: float


@dataclass(frozen=True, slots=True)
class _Round:
    """Measurements of one round."""

    clients: ClientMeasurements
    seconds: float
    cpu_s: float


async def measure_http(
    model: str, rounds: int, show: Show, *, profile: str = "", access_log: str = "", scale: float = 1.0
) -> HttpReport:
    """Interleave rounds of each load, after a warm-up of each. scale: of the work in a round.

    Raises EngineError.
    """
    measured: dict[str, list[_Round]] = {}
    show("starting the server")
    with _reserved_core() as core:
        options = ServerOptions(model=model, core=core, profile=profile, access_log=access_log)
        async with ServerProcess(options) as server:
            for number in range(rounds + 1):
                show(f"round {number} of {rounds}" if number else "warming up")
                for load in _loads(scale):
                    measured.setdefault(load.name, []).append(await load.run(server))
    return _report(core, rounds, {name: each[1:] for name, each in measured.items()})


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests of one round."""

    name: str
    clients: int
    requests: int
    max_tokens: int
    pace_s: float = 0.0

    @property
    def streams(self) -> bool:
        return self.max_tokens > SHORT_TOKENS

    async def run(self, server: ServerProcess) -> _Round:
        """Run one round."""
        before, began_s = await server.set_pace(Pace(self.pace_s)), time.monotonic()
        measured = await send_completions(
            server.port, self.clients, self.requests, max_tokens=self.max_tokens, stream=self.streams
        )
        seconds = time.monotonic() - began_s
        after = await server.set_pace(Pace(0.0))
        return _Round(measured, seconds, after.cpu_s - before.cpu_s)


_SHORT = f"short requests, {SHORT_CLIENTS} clients"
_ALONE = "short request, one client"


def _streamed(streams: int) -> str:
    return f"streamed tokens, {streams} streams"


def _paced(streams: int) -> str:
    return f"token, {streams} streams of {1 / PACE_S:.0f} a second"


def _loads(scale: float) -> Iterable[_Load]:
    yield _Load(_SHORT, SHORT_CLIENTS, max(SHORT_CLIENTS, int(scale * SHORT_REQUESTS)), SHORT_TOKENS)
    for streams in STREAMS:
        yield _Load(_streamed(streams), streams, streams, max(2, int(scale * STREAMED_TOKENS) // streams))
    yield _Load(_ALONE, 1, max(10, int(scale * ALONE_REQUESTS)), SHORT_TOKENS)
    for streams in STREAMS:
        yield _Load(_paced(streams), streams, streams, max(2, int(scale * PACED_STEPS)), PACE_S)


def _report(core: int | None, rounds: int, measured: dict[str, list[_Round]]) -> HttpReport:
    streamed = [each for streams in STREAMS for each in measured[_streamed(streams)]]
    return HttpReport(
        server_core=core,
        rounds=rounds,
        rates=(
            _rate(_SHORT, measured[_SHORT], [len(each.clients.took_s) for each in measured[_SHORT]], SHORT_GOAL),
            *(
                _rate(name, measured[name], [each.clients.tokens for each in measured[name]], STREAM_GOAL)
                for name in map(_streamed, STREAMS)
            ),
        ),
        late=(
            _late(_ALONE, [took for each in measured[_ALONE] for took in each.clients.took_s]),
            *(
                _late(name, [late for each in measured[name] for late in each.clients.late_s])
                for name in map(_paced, STREAMS)
            ),
        ),
        chunks_per_token=sum(each.clients.chunks for each in streamed) / sum(each.clients.tokens for each in streamed),
    )


def _rate(name: str, rounds: list[_Round], counts: list[int], goal: float) -> Throughput:
    cpu_us = Spread.of(1e6 * each.cpu_s / count for each, count in zip(rounds, counts, strict=True))
    return Throughput(
        name=name,
        per_s=Spread.of(count / each.seconds for each, count in zip(rounds, counts, strict=True)),
        cpu_us=cpu_us,
        per_cpu_s=1e6 / cpu_us.median,
        goal=goal,
    )


def _late(name: str, seconds: list[float]) -> AddedLatency:
    ordered = sorted(seconds)
    return AddedLatency(
        name=name, p50_ms=1e3 * ordered[len(ordered) // 2], p99_ms=1e3 * ordered[int(0.99 * (len(ordered) - 1))]
    )


@contextmanager
def _reserved_core() -> Iterator[int | None]:
    """Reserve a core for the server: this process, the clients, runs on the others. None where there is only one core,
    or the system has no CPU affinity."""
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
    """The report as text."""
    rates = [
        [
            rate.name,
            f"{rate.per_s.median:.0f}/s",
            f"{rate.per_s.least:.0f} to {rate.per_s.most:.0f}",
            f"{rate.cpu_us.median:.1f} us",
            f"{rate.per_cpu_s:.0f}/s",
            "" if rate.goal is None else f"{rate.goal:.0f}/s",
            "yes" if rate.reaches_goal else "NO",
        ]
        for rate in report.rates
    ]
    late = [[each.name, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms"] for each in report.late]
    where = "no core of its own" if report.server_core is None else f"core {report.server_core}, clients on the others"
    return "\n".join(
        (
            f"A server on {where}; {report.rounds} rounds, {report.chunks_per_token:.2f} chunks for each token",
            "",
            table(["", "median", "least to most", "server CPU each", "per core", "goal", "reached"], rates),
            "",
            table(["added latency", "p50", "p99"], late),
        )
    )
