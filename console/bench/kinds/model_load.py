"""Time to load a model, against raw reading of its files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from console.bench.kinds.base import BenchPart, Plan, SkipPart
from console.bench.measure import BenchContext, Values
from console.bench.result import Column
from console.bench.target import Target

_BLOCK_BYTES = 1 << 22
_GIB = 1 << 30


class Load(Plan, frozen=True, kw_only=True):
    """Both ways twice: with the files out of the page cache, and with them in it."""

    name: ClassVar[str] = "load"
    no_server: ClassVar = "This benchmark loads a model, which a server does not allow"
    about: ClassVar[str] = "time to load the model, compared with reading its files from disk and from the page cache"
    no_serving: ClassVar = "This benchmark unloads the model, which is serving; use 'ericllm bench load MODEL'"
    keys: ClassVar = (Column(name="files", title="files"),)
    columns: ClassVar = (
        Column(name="read_s", title="raw reading", unit="s", digits=2, better="lower"),
        Column(name="load_s", title="load", unit="s", digits=2, better="lower"),
        Column(name="load_to_read", title="load / reading", unit="x", digits=2, better="lower"),
        Column(name="read_gib_per_s", title="reading", unit="GiB/s", digits=2, better="higher"),
        Column(name="load_gib_per_s", title="loading", unit="GiB/s", digits=2, better="higher"),
        Column(name="size_gib", title="size", unit="GiB", digits=2),
    )

    @property
    def max_concurrent_requests(self) -> int:
        return 1

    def parts(self, target: Target) -> list[BenchPart]:
        kinds = ("from disk", "in page cache") if hasattr(os, "posix_fadvise") else ("in page cache",)
        return [BenchPart(keys={"files": kind}, requests=2) for kind in kinds]

    async def warm(self, context: BenchContext) -> None:
        """Plan: the model was loaded once already."""

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        files = [Path(name) for name in context.engine.weight_files()]
        if not files:
            raise SkipPart("The model has no weight files.")
        forgotten = part.keys["files"] == "from disk"
        read_s = await asyncio.to_thread(read_through, files, forgotten=forgotten)
        context.done(None)
        if forgotten:
            await asyncio.to_thread(forget, files)
        load_s = await context.engine.load_s()
        context.done(None)
        size_gib = sum(file.stat().st_size for file in files) / _GIB
        return {
            "read_s": read_s,
            "load_s": load_s,
            "load_to_read": load_s / read_s,
            "read_gib_per_s": size_gib / read_s,
            "load_gib_per_s": size_gib / load_s,
            "size_gib": size_gib,
        }


def read_through(files: Sequence[Path], *, forgotten: bool) -> float:
    """Seconds to read all files, one after the other. forgotten: from the disk, as far as the system obeys."""
    if forgotten:
        forget(files)
    block = bytearray(_BLOCK_BYTES)
    began_s = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass
    return time.perf_counter() - began_s


def forget(files: Sequence[Path]) -> None:
    """Ask the system to keep nothing of the files in memory; what a process has mapped stays there."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
