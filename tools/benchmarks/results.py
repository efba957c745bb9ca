"""Results: rounds of each cell, by shape, row, number of clients and length of prompts, stored as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.metrics.distributions import percentiles
from engine.snapshot import DeviceLimits
from tools.benchmarks.machine import Machine
from tools.benchmarks.protocol import PROMPT_TOKENS, Done


class Spread(msgspec.Struct, frozen=True):
    """The median of some rounds, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """That of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Latency(msgspec.Struct, frozen=True):
    """Of a round, in seconds, at the client: from sending a request to its first token, and between two chunks of an
    answer."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @classmethod
    def of(cls, done: Done) -> Latency | None:
        """None where the engine reports nothing before the end."""
        found = [*percentiles(done.ttft_s, 0.5, 0.99), *percentiles(done.itl_s, 0.5, 0.99)]
        numbers = [each for each in found if each is not None]
        return cls(*numbers) if len(numbers) == len(found) else None


class Round(msgspec.Struct, frozen=True):
    """rate: generated tokens per second."""

    rate: float
    latency: Latency | None = None


class Place(NamedTuple):
    """Which cell: prompt_tokens is about how many a prompt has."""

    shape: str
    row: str
    clients: int
    prompt_tokens: int = PROMPT_TOKENS


class Cell(msgspec.Struct, frozen=True):
    """The rounds of one row at a number of clients and a length of prompts."""

    shape: str
    row: str
    clients: int
    prompt_tokens: int
    rounds: tuple[Round, ...]

    @property
    def place(self) -> Place:
        """Which it is."""
        return Place(self.shape, self.row, self.clients, self.prompt_tokens)

    @property
    def spread(self) -> Spread:
        """Of the rates, over the rounds."""
        return Spread.of([each.rate for each in self.rounds])

    @property
    def latency(self) -> Latency | None:
        """Medians of the rounds, None where a round has none."""
        found = [each.latency for each in self.rounds if each.latency]
        if len(found) < len(self.rounds):
            return None
        return Latency(
            *(statistics.median(column) for column in zip(*map(msgspec.structs.astuple, found), strict=True))
        )


class Failure(msgspec.Struct, frozen=True):
    """Why a row has no more numbers for a shape: the error of its engine."""

    shape: str
    row: str
    reason: str


class Goal(msgspec.Struct, frozen=True):
    """Another promise of this engine's: a share, and what it may at most or must at least be."""

    shape: str
    title: str
    spread: Spread
    bound: float
    at_most: bool

    @property
    def is_met(self) -> bool:
        """By the median."""
        return self.spread.median <= self.bound if self.at_most else self.spread.median >= self.bound


class Results(msgspec.Struct, frozen=True):
    """One run of the benchmark, in one piece or several. versions: of the packages that ran, by row.

    commands: of each piece.  precisions: what each row's linear layers multiplied ("bf16", "f32", "int8"), by row.
    """

    machine: Machine
    date: str
    commands: tuple[str, ...]
    minutes: float
    limits: DeviceLimits | None = None
    cells: tuple[Cell, ...] = ()
    failures: tuple[Failure, ...] = ()
    goals: tuple[Goal, ...] = ()
    versions: dict[str, dict[str, str]] = {}
    precisions: dict[str, str] = {}

    def cell(self, place: Place) -> Cell | None:
        """None where there are no numbers."""
        return next((cell for cell in self.cells if cell.place == place), None)

    def failure(self, shape: str, row: str) -> Failure | None:
        """Why it has none, or fewer than the rounds."""
        return next((failure for failure in self.failures if (failure.shape, failure.row) == (shape, row)), None)

    def of(self, rows: Collection[str]) -> Results:
        """Return the part about those rows."""
        return msgspec.structs.replace(
            self,
            cells=tuple(cell for cell in self.cells if cell.row in rows),
            failures=tuple(failure for failure in self.failures if failure.row in rows),
            versions={row: versions for row, versions in self.versions.items() if row in rows},
            precisions={row: precision for row, precision in self.precisions.items() if row in rows},
        )

    def write(self, path: Path) -> None:
        """As JSON; the file is whole at any moment."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        partial.replace(path)


def read_results(path: Path) -> Results:
    """Those of a file. Raises OSError, and msgspec.DecodeError for what holds none."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
