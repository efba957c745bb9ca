"""Runs each part in a process of its own, inside its time: a part that hangs, crashes or loses the device costs the
others nothing, and keeps the rows it had. That process is `python -m tests.gpu.runner MODULE FOLDER ROWS SECONDS`."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tests.gpu.place import Place
from tests.gpu.report import Row, attempt

Group = Literal["", "correctness", "speed", "big"]
"""Parts to run together. "": what the others need, run with each of them.  big: only where it is asked for."""

_TAIL_BYTES = 2000
_END_S = 5.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """One group of checks. module: has `checks(place) -> Iterable[Row]`.  budget_s: its wall time at most.
    stall_s: it hangs where neither a row nor a line of its log came for so long."""

    name: str
    title: str
    module: str
    budget_s: float
    group: Group = ""
    stall_s: float = 100.0


class Result(NamedTuple):
    """The rows of a part that was run. seconds: None where no time was left for it."""

    part: Part
    rows: list[Row]
    seconds: float | None


def chosen(parts: Iterable[Part], only: str, *, big: bool = False) -> list[Part]:
    """The parts and the groups of parts named in "a,b"; for "" all, those of the group "big" where it is asked for.
    Raises ValueError naming what is unknown."""
    every = list(parts)
    groups = dict.fromkeys(part.group for part in every if part.group)
    names = [name.strip() for name in only.split(",") if name.strip()]
    if not names:
        return [part for part in every if big or part.group != "big"]
    for name in names:
        if name not in groups and all(name != part.name for part in every):
            raise ValueError(
                f"there is no part {name!r}; the parts are {', '.join(part.name for part in every)}, "
                f"and groups of them {', '.join(groups)}"
            )
    whole = any(name in groups for name in names)
    return [part for part in every if part.name in names or part.group in names or (whole and not part.group)]


def run_parts(
    parts: Iterable[Part],
    place: Place,
    *,
    total_s: float,
    environment: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_start: Callable[[Part, float], None] = lambda part, limit_s: None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Iterator[Result]:
    """Run the parts in order. A part for which no time is left is one error row.

    environment: added to this process's own for every part.  on_row: called with each row as it comes.
    """
    end = clock() + total_s
    for part in parts:
        started = clock()
        limit_s = min(part.budget_s, end - started)
        if limit_s <= 0:
            used_up = _error(part, f"the run's {total_s:g} s were used up")
            on_row(used_up)
            yield Result(part, [used_up], None)
            continue
        on_start(part, limit_s)
        rows = run_part(part, place, limit_s=limit_s, environment=environment or {}, clock=clock, on_row=on_row)
        yield Result(part, rows, round(clock() - started, 1))


def run_part(
    part: Part,
    place: Place,
    *,
    limit_s: float,
    environment: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The rows of one part, with an error row at the end where it ran out of time, hung, died, or had none."""
    place.folder.mkdir(parents=True, exist_ok=True)
    found, log = place.folder / f"{part.name}.rows", place.folder / f"{part.name}.log"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.runner", part.module, str(place.folder), str(found), str(limit_s)]
    command += ["--quick"] if place.quick else []
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        on_row(row)

    def add_new() -> None:
        for row in _rows(found)[len(rows) :]:
            add(msgspec.structs.replace(row, part=part.name))

    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **environment}
        )
        now_s = began_s = active_s = clock()
        active = (0, 0)
        status: int | None = None
        try:
            while status is None and now_s - began_s < limit_s and now_s - active_s < part.stall_s:
                with suppress(subprocess.TimeoutExpired):
                    status = child.wait(min(_POLL_S, limit_s))
                add_new()
                now_s, seen = clock(), (len(rows), log.stat().st_size)
                if seen != active:
                    active, active_s = seen, now_s
        finally:
            _end_group(child)
    add_new()
    if status is None:
        why = f"not done after {limit_s:.0f} s" if now_s - began_s >= limit_s else f"silent for {part.stall_s:.0f} s"
        add(_error(part, f"{why}: {_tail(log)}"))
    elif status != 0:
        add(_error(part, f"ended with {status}: {_tail(log)}"))
    elif not rows:
        add(_error(part, f"it checked nothing: {_tail(log)}"))
    return rows


def _error(part: Part, detail: str) -> Row:
    return Row(part=part.name, name=part.title, verdict="error", detail=detail)


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


def run_module(arguments: list[str]) -> None:
    """Write the rows of a module's `checks` as they come; an exception in it becomes its last row."""
    module, folder, found, seconds, *quick = arguments
    place = Place(Path(folder), quick=bool(quick), end_s=time.monotonic() + float(seconds))
    with Path(found).open("wb", buffering=0) as rows:
        for row in attempt(module, lambda: importlib.import_module(module).checks(place)):
            rows.write(msgspec.json.encode(row) + b"\n")


if __name__ == "__main__":
    run_module(sys.argv[1:])
