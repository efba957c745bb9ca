"""The library can be imported here, and how long its kernels took to compile where they had to be."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.backends.base import LoadProgress
from tests.gpu.library import imported
from tests.gpu.place import Place
from tests.gpu.report import Row, promise


def checks(place: Place) -> Iterable[Row]:
    """One row. A compilation says in this part's log how far it is."""
    told: list[LoadProgress] = []

    def report(progress: LoadProgress) -> None:
        told.append(progress)
        print(f"kernels: {progress.done} of {progress.total} files", flush=True)

    started = time.perf_counter()
    imported(report)
    seconds = time.perf_counter() - started
    how = f"{told[-1].total} files compiled" if told else "nothing had to be compiled"
    yield promise("import exllamav2", True, how, value=seconds, unit="s")
