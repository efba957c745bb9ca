"""Results as Markdown: rates, latencies, shares of the machine's limits, ratios and their goals, and what ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tools.benchmarks.engines import RATIOS, ROWS, Ratio, Row
from tools.benchmarks.limits import Share, share_of_limits
from tools.benchmarks.protocol import OUTPUT_TOKENS, PROMPT_TOKENS
from tools.benchmarks.results import Cell, Goal, Latency, Place, Results, Spread

TIE = 0.1
"""Rates that differ by less are the same on a machine that others use too."""

TITLE = "On a CPU, next to other engines"
NOTES = "#where-it-loses-and-what-is-being-done"
"""The section of the page that says of missed goals why, written by hand."""

_MARK = "†"
_OVER_LIMIT = (
    "A share over 100% means that the limit was measured lower than what the row reached: other guests slowed the "
    "machine at that time, or weights stayed in a cache, which is read faster than memory."
)


def markdown(results: Results, lacks: str = "") -> str:
    """A section of its own: how it was measured, tables of each shape and length of prompts, goals, and what is missed.

    lacks: what the run is short of, "" where nothing.
    """
    parts = [f"## {TITLE}", _introduction(results), f"This run lacks {lacks}." if lacks else ""]
    for shape in _shapes(results):
        parts.append(f"### {shape}")
        for prompt in sorted({cell.prompt_tokens for cell in results.cells if cell.shape == shape}) or [PROMPT_TOKENS]:
            clients = _clients(results, shape, prompt)
            parts += [f"Prompts of {prompt} tokens:"] if prompt != PROMPT_TOKENS else []
            parts += [rates_table(results, shape, clients, prompt), precisions(results, shape)]
            parts += [latencies_table(results, shape, clients, prompt), shares_table(results, shape, clients, prompt)]
            parts += [ratios_table(results, shape, clients, prompt)]
        parts += [goals_table([goal for goal in results.goals if goal.shape == shape])]
    parts += [slower(results), behind(results), failures(results), _versions(results)]
    return "\n\n".join(part for part in parts if part)


def rates_table(results: Results, shape: str, clients: Sequence[int], prompt: int = PROMPT_TOKENS) -> str:
    """Generated tokens per second: median (least to most)."""
    lines = []
    for row in ROWS:
        cells = [_rate(results, Place(shape, row.key, count, prompt)) for count in clients]
        if any(cells):
            lines.append([row.engine, _weights(results, row), *cells])
    return _table(["generated tok/s", "weights", *_heads(clients)], lines)


def latencies_table(results: Results, shape: str, clients: Sequence[int], prompt: int = PROMPT_TOKENS) -> str:
    """TTFT and ITL, medians of the rounds; "" where no row has any."""
    lines = []
    for row in ROWS:
        cells = [results.cell(Place(shape, row.key, count, prompt)) for count in clients]
        if any(cell and cell.latency for cell in cells):
            lines.append([row.engine, row.weights, *(_latency(cell.latency) if cell else "" for cell in cells)])
        elif any(cells):
            lines.append([row.engine, row.weights, "reports no single tokens", *[""] * (len(clients) - 1)])
    return _table(["TTFT p50 / p99; ITL p50 / p99, ms", "weights", *_heads(clients)], lines) if lines else ""


def shares_table(results: Results, shape: str, clients: Sequence[int], prompt: int = PROMPT_TOKENS) -> str:
    """Of this engine's rows: the share of the machine's larger limit, and what more than 100% means; "" where limits
    were not measured."""
    lines, most = [], 0.0
    for row in ROWS if results.limits else ():
        cells = [results.cell(Place(shape, row.key, count, prompt)) for count in clients] if row.is_ours else []
        if any(cells):
            shares = [_share(results, row, cell) for cell in cells]
            lines.append(
                [row.engine, row.weights, *(f"{each.share:.0%} {each.limit}" if each else "" for each in shares)]
            )
            most = max(most, *(each.share for each in shares if each))
    if not lines:
        return ""
    table = _table(["share of the machine's limit", "weights", *_heads(clients)], lines)
    return f"{table}\n\n{_OVER_LIMIT}" if round(most, 2) > 1 else table


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


class Compared(NamedTuple):
    """A ratio, and the row that it is over."""

    value: float
    over: Row


def compared(results: Results, ratio: Ratio, place: Place) -> Compared | None:
    """A ratio of medians at a place, whatever its row; None where one of both was not measured."""
    ours = results.cell(place._replace(row=ratio.row))
    others = [cell for key in ratio.over if (cell := results.cell(place._replace(row=key)))]
    if ours is None or not others:
        return None
    best = max(others, key=lambda cell: cell.spread.median)
    over = next(row for row in ROWS if row.key == best.row)
    return Compared(ours.spread.median / best.spread.median, over)


def ratios_table(results: Results, shape: str, clients: Sequence[int], prompt: int = PROMPT_TOKENS) -> str:
    """Each ratio of medians, its goal, and which peer is the best."""
    lines = []
    for ratio in RATIOS:
        cells = [_ratio(results, ratio, Place(shape, ratio.row, count, prompt)) for count in clients]
        if any(cells):
            lines.append([ratio.title, *cells])
    return _table(["ratio of medians (goal)", *_heads(clients)], lines) if lines else ""


def goals_table(goals: Iterable[Goal]) -> str:
    """The other promises."""
    lines = [
        [goal.title, _percent(goal.spread), f"{'max' if goal.at_most else 'min'} {goal.bound:.0%}"] for goal in goals
    ]
    return _table(["other goals", "measured", "goal"], lines) if lines else ""


def slower(results: Results) -> str:
    """Where another engine is faster by more than a tie than this one at its best with weights of as many bits or more;
    "" where none was measured."""
    others = [(row, cell) for row in ROWS if not row.is_ours for cell in results.cells if cell.row == row.key]
    lines = []
    for row, cell in others:
        ours = _best_of_ours(results, cell.place, row.bits)
        if ours and cell.spread.median > ours * (1 + TIE):
            times, prompt = cell.spread.median / ours, _prompt_text(cell.prompt_tokens)
            lines.append(
                f"* {cell.shape}, c={cell.clients}{prompt}: {row.engine}, {row.weights}, {times:.2f} times ours."
            )
    if lines:
        return "Other engines that are faster than this one with weights of as many bits or more:\n\n" + "\n".join(
            lines
        )
    return (
        "No other engine is faster, by more than a tie, than this one with weights of as many bits or more."
        if others
        else ""
    )


def _best_of_ours(results: Results, place: Place, bits: int) -> float:
    """In process, with weights of `bits` bits or more, of 16 where others have 32; 0 where that was not measured."""
    rows = [row for row in ROWS if row.is_ours and row.mode != "http" and row.bits >= min(bits, 16)]
    cells = [results.cell(place._replace(row=row.key)) for row in rows]
    return max((cell.spread.median for cell in cells if cell), default=0)


def behind(results: Results) -> str:
    """Which goals are missed; "" where none."""
    missed = []
    for ratio in RATIOS:
        for (shape, clients), least in ratio.least.items():
            found = compared(results, ratio, Place(shape, ratio.row, clients))
            if found is not None and found.value < least:
                missed.append(f"* {shape}, c={clients}: {ratio.title} is {found.value:.2f}; the goal is {least:.2f}.")
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


def _introduction(results: Results) -> str:
    rounds = sorted({len(cell.rounds) for cell in results.cells})
    pieces = " and then ".join(f"`{command}`" for command in results.commands)
    return (
        f"{results.machine.line}; {results.date}; {pieces}, {results.minutes:.0f} min.{_limits_text(results)}\n\n"
        f"Closed loop, c clients, c requests a round, prompts of about {PROMPT_TOKENS} tokens (the same ids for all) "
        f"unless said otherwise, and exactly {OUTPUT_TOKENS} out, greedy; synthetic Llama shapes, in bfloat16 or with "
        f"random codes. Median of {' or '.join(map(str, rounds))} interleaved rounds (least to most); "
        f"{results.machine.cores} threads each, and only one engine's processes run at a time. Differences under "
        f"{TIE:.0%} are ties. Latencies are those that clients see, over HTTP where the row says so: from sending a "
        "request to its first token, and between two chunks of an answer, which have a token each unless an engine "
        "sends several at once."
    )


def _limits_text(results: Results) -> str:
    limits = results.limits
    if limits is None:
        return ""
    short, wide, read = (
        (each or 0.0) / 1e9 for each in (limits.flops_16bit_per_s, limits.flops_32bit_per_s, limits.bytes_per_s)
    )
    return (
        f" Limits, the most that was measured: {short:.0f} GFLOP/s in products of 16 bits "
        f"(or of float32 where that is faster), {wide:.0f} of float32, {read:.1f} GB/s read."
    )


def _shapes(results: Results) -> list[str]:
    return list(dict.fromkeys([cell.shape for cell in results.cells] + [f.shape for f in results.failures]))


def _clients(results: Results, shape: str, prompt: int) -> list[int]:
    return sorted({cell.clients for cell in results.cells if (cell.shape, cell.prompt_tokens) == (shape, prompt)})


def _prompt_text(prompt: int) -> str:
    return "" if prompt == PROMPT_TOKENS else f", prompts of {prompt}"


def _weights(results: Results, row: Row) -> str:
    return f"{row.weights} {_MARK}" if _differs(results, row) else row.weights


def _differs(results: Results, row: Row) -> bool:
    return results.precisions.get(row.key, row.precision) != row.precision


def _rate(results: Results, place: Place) -> str:
    cell = results.cell(place)
    if cell is not None:
        return f"{_number(cell.spread.median)} ({_number(cell.spread.least)} to {_number(cell.spread.most)})"
    return "failed" if results.failure(place.shape, place.row) else ""


def _latency(latency: Latency | None) -> str:
    if latency is None:
        return ""
    ttft = f"{_number(latency.ttft_p50 * 1e3)} / {_number(latency.ttft_p99 * 1e3)}"
    return f"{ttft}; {_number(latency.itl_p50 * 1e3)} / {_number(latency.itl_p99 * 1e3)}"


def _share(results: Results, row: Row, cell: Cell | None) -> Share | None:
    if cell is None or results.limits is None:
        return None
    return share_of_limits(cell.shape, row.bits, cell.clients, cell.prompt_tokens, cell.spread.median, results.limits)


def _ratio(results: Results, ratio: Ratio, place: Place) -> str:
    found = compared(results, ratio, place)
    if found is None:
        return ""
    least = ratio.least.get((place.shape, place.clients)) if place.prompt_tokens == PROMPT_TOKENS else None
    goal = "" if least is None else f" ({least:.2f})"
    return f"{found.value:.2f}{goal}{f' {found.over.key}' if len(ratio.over) > 1 else ''}"


def _versions(results: Results) -> str:
    packages = {name: number for versions in results.versions.values() for name, number in versions.items()}
    return "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(packages.items())) if packages else ""


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _percent(spread: Spread) -> str:
    return f"{spread.median:.0%} ({spread.least:.0%} to {spread.most:.0%})"


def _heads(clients: Sequence[int]) -> list[str]:
    return [f"c={count}" for count in clients]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))
