"""Rounds in which every engine does the same work, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from tools.benchmarks.engine_process import EngineFailed, EngineProcess
from tools.benchmarks.engines import Row
from tools.benchmarks.machine import usable_cores
from tools.benchmarks.pace import Pace
from tools.benchmarks.places import NotPrepared, Places, Say
from tools.benchmarks.prompts import MAX_TOKENS, work_of
from tools.benchmarks.protocol import Given
from tools.benchmarks.results import Cell, Failure

_WARM_UP_TOKENS = 8
_SPARE_BYTES = 3 << 30


@dataclass(frozen=True)
class Plan:
    """Rows, shapes, clients and rounds of a run."""

    rows: tuple[Row, ...]
    shapes: tuple[str, ...]
    clients: tuple[int, ...]
    rounds: int

    def turns(self, round_: int) -> Iterator[tuple[int, Row]]:
        """Number of clients and row of each turn of a round; every other round goes backwards, so that none is always
        the one that follows a slow one."""
        order = self.rows[:: -1 if round_ % 2 else 1]
        for clients in self.clients:
            yield from ((clients, row) for row in order if row.runs_with([clients]))


@dataclass
class Measured:
    """Results so far."""

    rates: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    precisions: dict[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The rates by cell."""
        return tuple(Cell(*key, tuple(rates)) for key, rates in self.rates.items())


class Driver:
    """Measures a plan shape by shape; an engine that fails is left out from then on, and what it reason is kept."""

    def __init__(self, plan: Plan, places: Places, say: Say) -> None:
        self._plan, self._places, self._say = plan, places, say
        self._running: dict[str, EngineProcess] = {}
        self._failed: set[tuple[str, str]] = set()
        self.measured = Measured()

    def prepare(self) -> None:
        """Install the engines and make the models, so that rounds follow each other without a break."""
        for shape in self._plan.shapes:
            for row in self._plan.rows:
                try:
                    self._places.python(row, self._say)
                    self._places.model(shape, row, self._say)
                except (NotPrepared, OSError) as error:
                    self._fail(shape, row, str(error))

    def measure(self, shape: str, pace: Pace) -> None:
        """All rounds of a shape."""
        try:
            for round_ in range(self._plan.rounds):
                for clients, row in self._plan.turns(round_):
                    pace.next(shape, clients, row.key)
                    if (shape, row.key) not in self._failed:
                        self._turn(shape, row, clients, round_, pace)
        finally:
            for key in list(self._running):
                self._running.pop(key).close()

    def _turn(self, shape: str, row: Row, clients: int, round_: int, pace: Pace) -> None:
        try:
            engine = self._running.get(row.key) or self._start(shape, row)
            began_s = time.monotonic()
            done = engine.do(work_of(clients, round_))
            engine.pause()
        except (EngineFailed, NotPrepared, OSError) as error:
            self._fail(shape, row, str(error))
            return
        pace.took(time.monotonic() - began_s)
        self.measured.rates.setdefault((shape, row.key, clients), []).append(done.rate)
        self._say(f"{pace.text}: {shape} {row.key} c={clients} round {round_ + 1}: {done.rate:.1f} tok/s")

    def _start(self, shape: str, row: Row) -> EngineProcess:
        self._make_room()
        given = Given(
            model=self._places.model(shape, row, self._say),
            clients=max(self._plan.clients),
            max_tokens=MAX_TOKENS,
            threads=usable_cores(),
            mode=row.mode,
        )
        self._say(f"starting {row.key} with {shape}")
        command = [str(self._places.python(row)), "-m", f"tools.benchmarks.runners.{row.runner}", *given.arguments()]
        engine = EngineProcess(command, row.environment, self._places.log(shape, row.key))
        self._running[row.key] = engine
        self.measured.versions[row.key] = engine.about.versions
        self.measured.precisions[row.key] = engine.about.precision
        for clients in self._plan.clients:
            engine.do(work_of(clients, -1, output_tokens=_WARM_UP_TOKENS))
        return engine

    def _make_room(self) -> None:
        """End those that ran longest ago while memory is short: a machine that swaps measures nothing."""
        while self._running and psutil.virtual_memory().available < _SPARE_BYTES:
            oldest = next(iter(self._running))
            self._say(f"ending {oldest} to make room")
            self._running.pop(oldest).close()

    def _fail(self, shape: str, row: Row, reason: str) -> None:
        if (shape, row.key) in self._failed:
            return
        self._failed.add((shape, row.key))
        self.measured.failures.append(Failure(shape, row.key, reason))
        self._say(f"{shape} {row.key} failed: {reason}")
        if engine := self._running.pop(row.key, None):
            engine.close()


def all_turns(plan: Plan) -> Sequence[tuple[str, int, str]]:
    """Shape, clients and row of every turn of a whole run, in order."""
    return [
        (shape, clients, row.key)
        for shape in plan.shapes
        for round_ in range(plan.rounds)
        for clients, row in plan.turns(round_)
    ]
