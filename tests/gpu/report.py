"""What a run found: rows, tables of them, one JSON file, one exit code. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.system.files import replace_file

Verdict = Literal["passed", "failed", "missed", "measured", "skipped", "error"]
"""passed, failed: a promise held or did not.  missed: a speed below its goal.  measured: a number without a goal.
skipped: could not be tried on this machine.  error: the check itself broke or ran out of its time."""

_MARKS: dict[Verdict, str] = {
    "passed": "ok",
    "failed": "FAILED",
    "missed": "below goal",
    "measured": "",
    "skipped": "skipped",
    "error": "ERROR",
}
_MAX_DETAIL = 300


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. part: filled in by the runner.  goal: what `value` had to be, in words."""

    name: str
    verdict: Verdict
    part: str = ""
    value: float | None = None
    unit: str = ""
    goal: str = ""
    detail: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows come from. capability: compute capability of the card.  commit: of the checkout; of a copy without
    one, a digest of the engine's files."""

    card: str
    capability: str = ""
    driver: str = ""
    memory_bytes: int = 0
    python: str = ""
    torch: str = ""
    cuda: str = ""
    flash_attn: str = ""
    commit: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. at: local time, as in the file's name.  seconds: wall time of each part."""

    machine: Machine
    at: str
    quick: bool
    rows: tuple[Row, ...]
    seconds: dict[str, float]


def promise(name: str, held: bool, detail: str = "", *, value: float | None = None, unit: str = "") -> Row:
    """A row of a check that must hold."""
    return Row(name=name, verdict="passed" if held else "failed", value=value, unit=unit, detail=detail)


def at_least(name: str, value: float, goal: float, unit: str, detail: str = "") -> Row:
    """A row of a speed with a goal."""
    verdict: Verdict = "passed" if value >= goal else "missed"
    return Row(name=name, verdict=verdict, value=value, unit=unit, goal=f">= {goal:g}", detail=detail)


def at_most(name: str, value: float, goal: float, unit: str, detail: str = "") -> Row:
    """A row of a time with a goal."""
    verdict: Verdict = "passed" if value <= goal else "missed"
    return Row(name=name, verdict=verdict, value=value, unit=unit, goal=f"<= {goal:g}", detail=detail)


def measured(name: str, value: float, unit: str, detail: str = "") -> Row:
    """A row of a number that has no goal."""
    return Row(name=name, verdict="measured", value=value, unit=unit, detail=detail)


def skipped(name: str, why: str) -> Row:
    """A row of a check that this machine cannot do."""
    return Row(name=name, verdict="skipped", detail=why)


def attempt(name: str, check: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of `check`; an exception ends it with an error row, so that the checks after it go on."""
    try:
        yield from check()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield Row(name=name, verdict="error", detail=text[:_MAX_DETAIL])


def exit_code(rows: Iterable[Row]) -> int:
    """1 if a promise failed or a check broke, that of a speed too; else 0."""
    return int(any(row.verdict in ("failed", "error") for row in rows))


def table(rows: Sequence[Row], width: int = 0) -> str:
    """Rows for a terminal, one to a line. width: of the column of names, where none is longer."""
    width = max((width, *(len(row.name) for row in rows)))
    lines = []
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g} {row.unit}".strip()
        goal = f"({row.goal})" if row.goal else ""
        line = f"  {row.name:<{width}}  {_MARKS[row.verdict]:<10}  {value:>16} {goal:<10} {row.detail}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def summary(report: Report) -> str:
    """The machine, the rows that need a look, and how many there are of each verdict."""
    lines = [headline(report.machine)]
    bad = [row for row in report.rows if row.verdict in ("failed", "error", "missed")]
    if bad:
        lines += ["", table([msgspec.structs.replace(row, name=f"{row.part}: {row.name}") for row in bad])]
    counts = {verdict: sum(row.verdict == verdict for row in report.rows) for verdict in _MARKS}
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no rows"]
    return "\n".join(lines)


def write(report: Report, folder: Path) -> Path:
    """Save as `<card>-<time>.json` in `folder`, made if missing, in place of what it has of this run; returns the
    file."""
    card = "".join(letter if letter.isalnum() else "-" for letter in report.machine.card).strip("-") or "no-card"
    file = folder / f"{card}-{report.at.replace(':', '').replace(' ', '-')}.json"
    replace_file(file, msgspec.json.format(msgspec.json.encode(report), indent=2))
    return file


def read(file: Path) -> Report:
    """The report that `write` saved. Raises msgspec.ValidationError on another file's contents."""
    return msgspec.json.decode(file.read_bytes(), type=Report)


def headline(machine: Machine) -> str:
    """The machine in a line."""
    parts = [
        machine.card,
        f"capability {machine.capability}" if machine.capability else "",
        f"{machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else "",
        f"driver {machine.driver}" if machine.driver else "",
        f"torch {machine.torch}" if machine.torch else "",
        f"flash-attn {machine.flash_attn or 'not installed'}",
        machine.commit[:10],
    ]
    return ", ".join(part for part in parts if part)
