"""Rounds in which every engine does the same work, one after the other."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from tools.benchmarks.engine_process import EngineFailed, EngineProcess
from tools.benchmarks.engines import SERVER, Row
from tools.benchmarks.machine import usable_cores
from tools.benchmarks.places import NotPrepared, Places, Say
from tools.benchmarks.protocol import PROMPT_TOKENS, Given, max_tokens, work_of
from tools.benchmarks.results import Cell, Failure, Latency, Place, Results, Round

_WARM_UP_TOKENS = 8
_SPARE_BYTES = 3 << 30


@dataclass(frozen=True)
class Plan:
    """Rows, shapes, clients, lengths of prompts and rounds of a run. seconds: after which no turn begins."""

    rows: tuple[Row, ...]
    shapes: tuple[str, ...]
    clients: tuple[int, ...]
    rounds: int
    prompts: tuple[int, ...] = (PROMPT_TOKENS,)
    seconds: float = math.inf

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max_tokens(max(self.prompts))

    def turns(self, shape: str) -> Iterator[tuple[int, Place, Row]]:
        """Round, cell and row of each turn; every other round goes backwards, so that none is always the one that
        follows a slow one."""
        for round_ in range(self.rounds):
            order = self.rows[:: -1 if round_ % 2 else 1]
            for prompt in self.prompts:
                for clients in self.clients:
                    for row in order:
                        if row.runs_with(clients):
                            yield round_, Place(shape, row.key, clients, prompt), row


class Pace:
    """Counts turns. One that is still to come will take as long as its like did; where there was none, as long a
    client as the turns so far did on average."""

    def __init__(self, turns: Sequence[Place]) -> None:
        self._left = list(turns)[::-1]
        self._count = len(turns)
        self._took_s: dict[Place, float] = {}

    def next(self) -> None:
        """A turn begins."""
        self._left.pop()

    def took(self, place: Place, seconds: float) -> None:
        """A turn took so long."""
        self._took_s[place] = seconds

    def estimate_s(self, place: Place) -> float:
        """Seconds of one to come."""
        measured = [seconds / each.clients for each, seconds in self._took_s.items()]
        a_client_s = sum(measured) / len(measured) if measured else 0.0
        return self._took_s.get(place, a_client_s * place.clients)

    @property
    def left_s(self) -> float:
        """Seconds of the turns to come."""
        return sum(map(self.estimate_s, self._left))

    @property
    def text(self) -> str:
        """In words."""
        return f"{self._count - len(self._left)} of {self._count}, about {self.left_s / 60:.0f} min left"


@dataclass
class Measured:
    """Results so far."""

    rounds: dict[Place, list[Round]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    precisions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Results | None) -> Measured:
        """Those of an earlier piece of the run, without its failures, as what failed is tried again."""
        if results is None:
            return cls()
        rounds = {cell.place: list(cell.rounds) for cell in results.cells}
        return cls(rounds, [], dict(results.versions), dict(results.precisions))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The rounds by cell."""
        return tuple(Cell(*place, tuple(rounds)) for place, rounds in self.rounds.items())


class Driver:
    """Measures a plan shape by shape; an engine that fails is left out from then on, and its reason is reported."""

    def __init__(self, plan: Plan, places: Places, say: Say, before: Results | None = None) -> None:
        """before: results of an earlier piece, whose rounds are not measured again."""
        self._plan, self._places, self._say = plan, places, say
        self._running: dict[str, EngineProcess] = {}
        self._failed: set[tuple[str, str]] = set()
        self._until_s = time.monotonic() + plan.seconds
        self.measured = Measured.of(before)
        self._pace = Pace([place for shape in plan.shapes for _, place, _ in self._turns(shape)])

    def prepare(self) -> None:
        """Install the engines and make the models, so that rounds follow each other without a break."""
        for shape in self._plan.shapes:
            for row in self._plan.rows:
                try:
                    self._places.python(row, self._say)
                    self._places.model(shape, row, self._say)
                except (NotPrepared, OSError) as error:
                    self._fail(shape, row, str(error))

    def measure(self, shape: str, saved: Callable[[], None]) -> bool:
        """All rounds of a shape that are not there; `saved` is called after each turn. False where time is up."""
        try:
            for round_, place, row in self._turns(shape):
                self._pace.next()
                if (shape, row.key) in self._failed:
                    continue
                if time.monotonic() + self._pace.estimate_s(place) > self._until_s:
                    self._say("the time is up")
                    return False
                self._turn(place, row, round_)
                saved()
            return True
        finally:
            for key in list(self._running):
                self._running.pop(key).close()

    def _turns(self, shape: str) -> list[tuple[int, Place, Row]]:
        """Those that are still to be measured."""
        there = {place: len(rounds) for place, rounds in self.measured.rounds.items()}
        return [(round_, place, row) for round_, place, row in self._plan.turns(shape) if round_ >= there.get(place, 0)]

    def _turn(self, place: Place, row: Row, round_: int) -> None:
        try:
            engine = self._running.get(row.key) or self._start(place.shape, row)
            began_s = time.monotonic()
            done = engine.do(work_of(place.clients, round_, prompt_tokens=place.prompt_tokens))
            engine.pause()
        except (EngineFailed, NotPrepared, OSError) as error:
            self._fail(place.shape, row, str(error))
            return
        self._pace.took(place, time.monotonic() - began_s)
        found = Round(done.rate, Latency.of(done))
        self.measured.rounds.setdefault(place, []).append(found)
        self._say(
            f"{self._pace.text}: {place.shape} {row.key} c={place.clients} prompts of {place.prompt_tokens} "
            f"round {round_ + 1}: {done.rate:.1f} tok/s{_latency_text(found)}"
        )

    def _start(self, shape: str, row: Row) -> EngineProcess:
        self._make_room()
        clients = [clients for clients in self._plan.clients if row.runs_with(clients)]
        self._say(f"starting {row.key} with {shape}")
        engine = start(self._places, shape, row, max(clients), self._plan.max_tokens)
        self._running[row.key] = engine
        self.measured.versions[row.key] = engine.about.versions
        self.measured.precisions[row.key] = engine.about.precision
        first, *longer = self._plan.prompts
        for count, prompt in (*((count, first) for count in clients), *((clients[0], prompt) for prompt in longer)):
            engine.do(work_of(count, -1, prompt_tokens=prompt, output_tokens=_WARM_UP_TOKENS))
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


def start(places: Places, shape: str, row: Row, clients: int, tokens: int, kv_tokens: int = 0) -> EngineProcess:
    """Start a row's runner for `clients` requests of max `tokens` tokens, all together of max `kv_tokens` unless 0.
    Raises EngineFailed, NotPrepared
    and OSError."""
    python = places.python(row)
    given = Given(places.model(shape, row), clients, tokens, usable_cores(), row.mode, str(python), kv_tokens)
    ours = row.runner == SERVER  # of a server, what runs in its own venv is the server
    runner = [sys.executable if ours else str(python), "-m", f"tools.benchmarks.runners.{row.runner}"]
    return EngineProcess([*runner, *given.arguments()], row.environment, places.log(shape, row.key))


def _latency_text(found: Round) -> str:
    if found.latency is None:
        return ""
    ttft, itl = found.latency.ttft_p50 * 1e3, found.latency.itl_p50 * 1e3
    return f", TTFT {ttft:.0f} ms, ITL {itl:.1f} ms"
