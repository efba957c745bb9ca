"""Results as Markdown: rates, their ratios against what was promised, and what ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tools.benchmarks.engines import OURS, RATIOS, ROWS, Ratio, Row
from tools.benchmarks.results import Cell, Goal, Results, Spread

TIE = 0.1
"""Rates that differ by less are the same on a machine that others use too."""

NOTES = "#where-it-loses-and-what-is-being-done"
"""The section of the page that says of missed goals why, kept by hand."""

_MARK = "†"
_ALL = frozenset(row.key for row in ROWS)


def markdown(results: Results, title: str) -> str:
    """A section of its own: how it was measured, rates, ratios, goals, and what is missed."""
    clients = sorted({cell.clients for cell in results.cells})
    parts = [f"## {title}", _introduction(results)]
    for shape in _shapes(results):
        parts += [f"### {shape}", rates_table(results, shape, clients), precisions(results, shape)]
        parts += [ratios_table(results, shape, clients)]
        parts += [goals_table([goal for goal in results.goals if goal.shape == shape])]
    parts += [slower(results), behind(results), failures(results), _versions(results)]
    return "\n\n".join(part for part in parts if part)


def other_rows(results: Results, rows: Collection[str], title: str, main_title: str) -> str:
    """A section of those rows alone, whose run's other rows stand under `main_title`."""
    own = results.of(rows)
    clients = sorted({cell.clients for cell in own.cells})
    where = f"[{main_title}](#{main_title.lower().replace(',', '').replace(' ', '-')})"
    parts = [f"## {title}", f"Rows that no goal speaks of, of this run: {_run(results)}\n\nHow: as under {where}."]
    for shape in _shapes(own):
        parts += [f"### {shape}", rates_table(own, shape, clients), precisions(own, shape)]
    parts += [slower(results, rows), failures(own), _versions(own)]
    return "\n\n".join(part for part in parts if part)


def rates_table(results: Results, shape: str, clients: Sequence[int]) -> str:
    """Generated tokens per second: median (least to most)."""
    lines = [
        [row.engine, _weights(results, row), *(_rate(results, shape, row, count) for count in clients)]
        for row in ROWS
        if results.failure(shape, row.key) or any(results.cell(shape, row.key, count) for count in clients)
    ]
    return _table(["generated tok/s", "weights", *(f"c={count}" for count in clients)], lines)


def precisions(results: Results, shape: str) -> str:
    """Which rows of a shape compute in another precision than they are named by; "" where none."""
    shown = {cell.row for cell in results.cells if cell.shape == shape}
    lines = []
    for row in ROWS:
        if row.key in shown and _differs(results, row):
            storage = (
                f", from weights stored as {row.convert}"
                if row.convert.lower() not in ("", row.weights.lower())
                else ""
            )
            lines.append(f"{row.engine}, {row.weights}, in {results.precisions[row.key]}{storage}")
    return f"{_MARK} Computed in another precision than the row is named by: {'; '.join(lines)}." if lines else ""


def ratios_table(results: Results, shape: str, clients: Sequence[int]) -> str:
    """Each ratio of medians, and its goal."""
    lines = []
    for ratio in RATIOS:
        cells = [_ratio(results, ratio, shape, count) for count in clients]
        if any(cells):
            lines.append([ratio.title, *cells])
    return _table(["ratio of medians (goal)", *(f"c={count}" for count in clients)], lines) if lines else ""


def goals_table(goals: Iterable[Goal]) -> str:
    """The other promises."""
    lines = [
        [goal.title, _percent(goal.spread), f"{'max' if goal.at_most else 'min'} {goal.bound:.0%}"] for goal in goals
    ]
    return _table(["other goals", "measured", "goal"], lines) if lines else ""


def slower(results: Results, among: Collection[str] = _ALL) -> str:
    """Where another engine, `among` those rows, is faster by more than a tie than this one at its best with weights of
    as many bits or more; "" where none was measured."""
    rows = [row for row in ROWS if row.key in among and row.runner != OURS]
    others = [(row, cell) for row in rows for cell in results.cells if cell.row == row.key]
    lines = []
    for row, cell in others:
        ours = _best_of_ours(results, cell, row.bits)
        if ours and cell.spread.median > ours * (1 + TIE):
            times = cell.spread.median / ours
            lines.append(f"* {cell.shape}, c={cell.clients}: {row.engine}, {row.weights}, {times:.2f} times ours.")
    if lines:
        return "Other engines that are faster than this one with weights of as many bits or more:\n\n" + "\n".join(
            lines
        )
    return (
        "No other engine is faster, by more than a tie, than this one with weights of as many bits or more."
        if others
        else ""
    )


def _best_of_ours(results: Results, cell: Cell, bits: int) -> float:
    """In process, with weights of `bits` bits or more; 0 where that was not measured."""
    keys = {row.key for row in ROWS if row.runner == OURS and row.mode != "http" and row.bits >= bits}
    ours = [each for each in results.cells if each.row in keys]
    return max(
        (each.spread.median for each in ours if (each.shape, each.clients) == (cell.shape, cell.clients)), default=0
    )


def behind(results: Results) -> str:
    """Which goals are missed; "" where none."""
    missed = []
    for ratio in RATIOS:
        for (shape, clients), least in ratio.least.items():
            value = ratio_of(results, ratio, shape, clients)
            if value is not None and value < least:
                missed.append(f"* {shape}, c={clients}: {ratio.title} is {value:.2f}; the goal is {least:.2f}.")
    missed += [
        f"* {goal.shape}: {goal.title} is {goal.spread.median:.0%}; the goal is {goal.bound:.0%}."
        for goal in results.goals
        if not goal.is_met
    ]
    return f"Goals that are missed ([why, and what is being done]({NOTES})):\n\n" + "\n".join(missed) if missed else ""


def failures(results: Results) -> str:
    """Return the reasons of engines without numbers."""
    named = {row.key: f"{row.engine}, {row.weights}" for row in ROWS}
    lines = [
        f"* {failure.shape}, {named.get(failure.row, failure.row)}: {failure.reason}" for failure in results.failures
    ]
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def ratio_of(results: Results, ratio: Ratio, shape: str, clients: int) -> float | None:
    """None where one of the two was not measured."""
    above = results.cell(shape, ratio.row, clients)
    below = next((cell for key in ratio.over if (cell := results.cell(shape, key, clients))), None)
    return above.spread.median / below.spread.median if above and below else None


def _introduction(results: Results) -> str:
    rounds = max((len(cell.rates) for cell in results.cells), default=0)
    return (
        f"{_run(results)}\n\nClosed loop, c clients, c requests a round, about 128 prompt tokens in (the same ids "
        f"for all) and exactly 128 out, greedy; synthetic Llama shapes in bfloat16. Median of {rounds} interleaved "
        f"rounds (least to most); {results.machine.cores} threads each, and only one engine's processes run at a time. "
        f"Differences under {TIE:.0%} are ties."
    )


def _run(results: Results) -> str:
    return f"{results.machine.line}; {results.date}; `{results.command}`, {results.minutes:.0f} min."


def _shapes(results: Results) -> list[str]:
    return list(dict.fromkeys([cell.shape for cell in results.cells] + [f.shape for f in results.failures]))


def _weights(results: Results, row: Row) -> str:
    return f"{row.weights} {_MARK}" if _differs(results, row) else row.weights


def _differs(results: Results, row: Row) -> bool:
    return results.precisions.get(row.key, row.precision) != row.precision


def _rate(results: Results, shape: str, row: Row, clients: int) -> str:
    cell = results.cell(shape, row.key, clients)
    if cell is not None:
        return f"{_number(cell.spread.median)} ({_number(cell.spread.least)} to {_number(cell.spread.most)})"
    return "failed" if results.failure(shape, row.key) else ""


def _ratio(results: Results, ratio: Ratio, shape: str, clients: int) -> str:
    value = ratio_of(results, ratio, shape, clients)
    least = ratio.least.get((shape, clients))
    if value is None:
        return ""
    return f"{value:.2f}" if least is None else f"{value:.2f} ({least:.2f})"


def _versions(results: Results) -> str:
    packages = {name: number for versions in results.versions.values() for name, number in versions.items()}
    return "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(packages.items())) if packages else ""


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _percent(spread: Spread) -> str:
    return f"{spread.median:.0%} ({spread.least:.0%} to {spread.most:.0%})"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))
