"""Runs each part in a process of its own, inside its time: a part that hangs, crashes or loses the device costs the
others nothing, and keeps the rows it had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.gpu.place import Place
from tests.gpu.report import Row

_TAIL_BYTES = 2000
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """One group of checks. module: has `checks(place) -> Iterable[Row]`.  budget_s: its wall time at most."""

    name: str
    title: str
    module: str
    budget_s: float


def chosen(parts: Iterable[Part], only: str) -> list[Part]:
    """The parts named in "a,b", all of them for "". Raises ValueError naming what is unknown."""
    known = {part.name: part for part in parts}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"there is no part {name!r}; the parts are {', '.join(known)}")
    return [known[name] for name in names]


def run_parts(
    parts: Iterable[Part],
    place: Place,
    *,
    total_s: float,
    environment: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_start: Callable[[Part, float], None] = lambda part, limit_s: None,
) -> tuple[list[Row], dict[str, float]]:
    """Rows of all parts in order, and each part's seconds. A part for which no time is left is one error row.

    environment: added to this process's own for every part.
    """
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    end = clock() + total_s
    for part in parts:
        started = clock()
        limit_s = min(part.budget_s, end - started)
        if limit_s <= 0:
            rows.append(
                Row(part=part.name, name=part.title, verdict="error", detail=f"the run's {total_s:g} s were used up")
            )
            continue
        on_start(part, limit_s)
        rows += run_part(part, place, limit_s=limit_s, environment=environment or {})
        seconds[part.name] = round(clock() - started, 1)
    return rows, seconds


def run_part(part: Part, place: Place, *, limit_s: float, environment: Mapping[str, str]) -> list[Row]:
    """The rows of one part, with an error row at the end where it ran out of time or died."""
    place.folder.mkdir(parents=True, exist_ok=True)
    found, log = place.folder / f"{part.name}.rows", place.folder / f"{part.name}.log"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.child", part.module, str(place.folder), str(found), str(limit_s)]
    command += ["--quick"] if place.quick else []
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **environment}
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(child)
    rows = [msgspec.structs.replace(row, part=part.name) for row in _rows(found)]
    if status is None:
        rows.append(
            Row(
                part=part.name, name=part.title, verdict="error", detail=f"not done after {limit_s:.0f} s: {_tail(log)}"
            )
        )
    elif status != 0:
        rows.append(Row(part=part.name, name=part.title, verdict="error", detail=f"ended with {status}: {_tail(log)}"))
    return rows


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Stop the part and whatever it started, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)


def _rows(file: Path) -> list[Row]:
    """What the part wrote. A last line without its end was cut off when the part was stopped, and is left out."""
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in file.read_bytes().split(b"\n")[:-1]]


def _tail(log: Path) -> str:
    """The last line that says something, of what the part printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")
