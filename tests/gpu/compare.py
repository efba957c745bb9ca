"""Two results beside each other: `python -m tests.gpu.compare BEFORE.json AFTER.json`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from tests.gpu.report import Report, Row, read


def compare(before: Report, after: Report) -> str:
    """A line for every row that is in either: both values, the change in percent, and verdicts that differ."""
    old = {(row.part, row.name): row for row in before.rows}
    new = {(row.part, row.name): row for row in after.rows}
    keys = list(dict.fromkeys([*old, *new]))
    width = max((len(f"{part}: {name}") for part, name in keys), default=0)
    lines = [f"before: {_origin(before)}", f"after:  {_origin(after)}", ""]
    lines += [
        f"{f'{part}: {name}':<{width}}  {_change(old.get((part, name)), new.get((part, name)))}" for part, name in keys
    ]
    return "\n".join(lines)


def _origin(report: Report) -> str:
    machine = report.machine
    return f"{machine.card}, torch {machine.torch}, {machine.commit[:10] or 'no commit'}, {report.at}"


def _change(before: Row | None, after: Row | None) -> str:
    if before is None or after is None:
        only, which = (after, "after") if before is None else (before, "before")
        return f"only {which}: {_value(only)}"
    said = f"{_value(before)} -> {_value(after)}"
    if before.value and after.value is not None:
        said += f"  {100 * (after.value / before.value - 1):+.1f} %"
    return said if before.verdict == after.verdict else f"{said}  [{before.verdict} -> {after.verdict}]"


def _value(row: Row | None) -> str:
    if row is None or row.value is None:
        return row.verdict if row else ""
    return f"{row.value:.4g} {row.unit}".strip()


def main() -> None:
    """Compare the two files named."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compare", description="Compare two results.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args()
    try:
        print(compare(read(given.before), read(given.after)))
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"not a result of tests/gpu: {error}")


if __name__ == "__main__":
    main()
