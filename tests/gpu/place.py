"""Where a run keeps its models, and how much of everything it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """One run's folder and measure. quick: fewer rounds, fewer sizes, the same promises."""

    folder: Path
    quick: bool = False

    @property
    def models(self) -> Path:
        """The synthetic models of this run."""
        return self.folder / "models"

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of concurrent requests to measure at."""
        return (1, 32) if self.quick else (1, 8, 32, 64)

    @property
    def rounds(self) -> int:
        """Interleaved rounds that are counted, after one that warms up."""
        return 1 if self.quick else 3
