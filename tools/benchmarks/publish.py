"""Publication of a run in the docs: a section of a page between two comments that name it, and its JSON next to it."""

from __future__ import annotations

from pathlib import Path

from tools.benchmarks.engines import chosen
from tools.benchmarks.report import markdown
from tools.benchmarks.results import Place, Results

NAME = "bench-peers"
SHAPES, CLIENTS, ROUNDS = ("135m", "0.5b"), (1, 8, 32), 3
"""The least of a complete run, which `make bench-peers` measures if nothing else is asked for."""


def lacking(results: Results) -> str:
    """How a run falls short of a complete one, "" where it does not. A row that cannot run and says why is no lack."""
    missing = [
        Place(shape, row.key, clients)
        for shape in SHAPES
        for row in chosen(None)
        for clients in CLIENTS
        if row.runs_with(clients) and not results.failure(shape, row.key)
    ]
    there = {cell.place: len(cell.rounds) for cell in results.cells}
    short = [place for place in missing if there.get(place, 0) < ROUNDS]
    lacks = []
    if short:
        first = f"{ROUNDS} rounds of {short[0].row} of {short[0].shape} with c={short[0].clients}"
        lacks.append(first + (f" and {len(short) - 1} more" if short[1:] else ""))
    promised = {goal.shape for goal in results.goals}
    lacks += [f"prefill, prefix and load of {shape}" for shape in SHAPES if shape not in promised]
    return ", ".join(lacks)


def write(results: Results, page: Path) -> Path:
    """Put the section into the page and the results next to it; return the file of these.

    Raises ValueError where the page has half a section, and OSError.
    """
    write_section(page, NAME, markdown(results, lacking(results)))
    file = page.with_name(f"{NAME}.json")
    results.write(file)
    return file


def with_section(page: str, name: str, text: str) -> str:
    """`page` with that section replaced, or put at its end. Raises ValueError where one of its marks is missing."""
    begin, end = f"<!-- {name}: begin, written by make {name} -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin not in page and end not in page:
        return f"{page.rstrip()}\n\n{section}\n"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f'the page has one mark of "{name}" without the other')
    return f"{before}{section}{after}"


def write_section(path: Path, name: str, text: str) -> None:
    """Replace it in a file."""
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    path.write_text(with_section(page, name, text), encoding="utf-8")
