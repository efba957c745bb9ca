"""Publication of a run in the docs: a section of the page and a JSON file for each of its two kinds of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.complete import lacking
from tools.benchmarks.engines import ROWS, chosen
from tools.benchmarks.page import write_section
from tools.benchmarks.places import Say
from tools.benchmarks.report import markdown, other_rows
from tools.benchmarks.results import Results

GOALS, PEERS = "bench-cpu", "bench-peers"
TITLES = {GOALS: "On a CPU, against what was promised", PEERS: "On a CPU, next to other engines"}
GOAL_ROWS = frozenset(row.key for row in ROWS if row.goal)


@dataclass(frozen=True)
class Section:
    """A part of the page, and the results that its JSON keeps. lacks: what it is short of; "" where it is complete."""

    name: str
    text: str
    results: Results
    lacks: str


def sections(results: Results, which: Iterable[str]) -> list[Section]:
    """The section of rows that goals speak of and, where PEERS is asked for, that of all others; none without rates.

    The JSON of the latter keeps the whole run, so that it shows by itself what others are compared with.
    """
    made = []
    goals = results.of(GOAL_ROWS)
    if goals.cells:
        made.append(Section(GOALS, markdown(goals, TITLES[GOALS]), goals, _lacks(goals, goals_only=True)))
    rest = {row.key for row in ROWS} - GOAL_ROWS
    if PEERS in which and results.of(rest).cells:
        text = other_rows(results, rest, TITLES[PEERS], TITLES[GOALS])
        made.append(Section(PEERS, text, results, _lacks(results, goals_only=False)))
    return made


def publish(made: Sequence[Section], page: Path, say: Say, *, write: bool | None) -> None:
    """Put sections into `page`, their results next to it as JSON. Raises ValueError where the page has half a section.

    write: None for those that are complete alone.
    """
    for section in made:
        if write is None and section.lacks:
            say(f"{page.name} keeps its {section.name}: this run lacks {section.lacks}; --write publishes it still")
        elif write is not False:
            write_section(page, section.name, section.text)
            file = page.with_name(f"{section.name}.json")
            section.results.write(file)
            say(f"written: {section.name} of {page.name}, and {file.name}")


def _lacks(results: Results, *, goals_only: bool) -> str:
    rounds = {(cell.shape, cell.clients, cell.row): len(cell.rates) for cell in results.cells}
    rows = chosen(None, goals_only=goals_only, flags=results.machine.flags)
    return lacking(rounds, {goal.shape for goal in results.goals}, rows)
