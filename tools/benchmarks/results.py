"""Results: rates by shape, row and number of clients, kept as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from tools.benchmarks.machine import Machine


class Spread(msgspec.Struct, frozen=True):
    """The median of some rounds, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """That of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Cell(msgspec.Struct, frozen=True):
    """Generated tokens per second of one row at a number of clients, one for each round."""

    shape: str
    row: str
    clients: int
    rates: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Over the rounds."""
        return Spread.of(self.rates)


class Failure(msgspec.Struct, frozen=True):
    """Why a row has no more numbers for a shape: the error of its engine."""

    shape: str
    row: str
    reason: str = msgspec.field(name="said")


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
    """One run of the benchmark. versions: of the packages that ran, by row.

    precisions: what each row's linear layers multiplied ("bf16", "f32", "int8"), by row.
    """

    machine: Machine
    date: str
    command: str
    minutes: float
    cells: tuple[Cell, ...] = ()
    failures: tuple[Failure, ...] = ()
    goals: tuple[Goal, ...] = ()
    versions: dict[str, dict[str, str]] = {}
    precisions: dict[str, str] = {}

    def cell(self, shape: str, row: str, clients: int) -> Cell | None:
        """None where there are no numbers."""
        return next((c for c in self.cells if (c.shape, c.row, c.clients) == (shape, row, clients)), None)

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
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_results(path: Path) -> Results:
    """Those of a file. Raises OSError, and msgspec.DecodeError for what holds none."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
