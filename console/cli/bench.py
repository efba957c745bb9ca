"""`ericllm bench`: measure a model that serves, and compare results."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from console.bench.comparison import TIE, Comparison, compare
from console.bench.export import csv_text, plot
from console.bench.history import BenchHistory, Kept
from console.bench.kinds import PLANS
from console.bench.result import BenchResult, encode_result, read_result, write_file
from console.bench.text import column_title, median_text, result_text, table
from console.runtime.output import write
from console.settings.schema import state_dir
from engine.errors import InvalidRequest
from engine.text.printable import printable

# `ericllm bench history|show|compare|plot|forget`: results that were kept, as a person or a program reads them.

RESULT_COMMANDS = ("history", "show", "compare", "plot", "forget")
_LAST = re.compile(r"last(?:~(\d{1,18}))?")
_DIGITS = 4000
"""Of a number; Python reads no longer ones, and no file has such a name either."""
_WORDS = {"better": "better", "worse": "WORSE", "changed": "changed", "same": "same", "unclear": "-"}
_REFERENCE = "result file, number in the history, 'last' or 'last~1' (the one before)"


def show_results(argv: Sequence[str], parser: argparse.ArgumentParser, folder: Path | None = None) -> int:
    """Run one of RESULT_COMMANDS; returns 0. folder: of the history, the user's where None. Raises EngineError for what
    is not there."""
    given = _parse_results(argv, parser)
    history = BenchHistory(folder or state_dir())
    match given.what:
        case "history":
            results = history.results(given.bench, given.model, given.limit)
            text = msgspec.json.encode(results).decode() if given.as_json else history_text(results)
        case "show":
            result = find_result(given.result, history)
            form = "json" if given.as_json else "csv" if given.as_csv else "text"
            text = shown(result, form, everything=given.everything)
        case "compare":
            comparison = compare(find_result(given.before, history), find_result(given.after, history), given.tie / 100)
            text = (
                msgspec.json.encode(comparison).decode()
                if given.as_json
                else comparison_text(comparison, everything=given.everything)
            )
        case "forget":
            history.remove(given.number)
            text = f"result {given.number} deleted"
        case _:
            text = plot(find_result(given.result, history), given.column)
            if given.out:
                write_file(given.out, text.encode(), "out")
                text = f"saved {given.out}"
    write(text.rstrip(), as_json=getattr(given, "as_json", False))
    return 0


def find_result(text: str, history: BenchHistory) -> BenchResult:
    """The result that `text` stands for: a file, a number of the history, or "last" and "last~N" of it.

    Raises InvalidRequest where there is none.
    """
    last = _LAST.fullmatch(text)
    if last is not None:
        back = int(last[1] or 0)
        newest = history.results(limit=back + 1)
        if len(newest) <= back:
            raise InvalidRequest(f"the history has {len(newest)} results, so {text} does not exist", param="result")
        return history.result(newest[back].id)
    numbered = text.isdecimal() and len(text) <= _DIGITS
    return history.result(int(text)) if numbered else read_result(Path(text))


def history_text(results: Sequence[Kept]) -> str:
    """A table of what was kept, the newest first."""
    if not results:
        return "No saved results. Run 'ericllm bench latency demo' to make one."
    rows = [
        (
            str(each.id),
            each.name,
            f"{each.started[:10]} {each.started[11:16]}",
            f"{each.duration_s:.0f} s" + ("" if each.complete else ", ended early"),
            each.model,
            each.target,
        )
        for each in results
    ]
    return table(("number", "bench", "started (UTC)", "took", "model", "target"), rows)


def shown(result: BenchResult, form: str, *, everything: bool = False) -> str:
    """A result as "json", as "csv", or as its bench printed it, with the day; everything: with all numbers."""
    if form == "json":
        return encode_result(result).decode()
    if form == "csv":
        return csv_text(result)
    day, time = result.started[:10], result.started[11:16]
    return f"measured {printable(f'{day} {time}')} UTC\n{result_text(result, everything=everything)}"


def comparison_text(comparison: Comparison, *, everything: bool = False) -> str:
    """Notes, a table of the numbers before and after with the spread of the repeats, and other differences.

    everything: with the numbers that a table does not show.
    """
    columns = {column.name: column for column in comparison.columns if everything or column.shown}
    rows = [
        [
            " ".join(f"{key} {value}" for key, value in change.keys.items()) or comparison.name,
            column_title(columns[change.column]),
            median_text(change.before, change.before_spread, columns[change.column]),
            median_text(change.after, change.after_spread, columns[change.column]),
            "-" if change.share is None else f"{change.share:+.1%}",
            _WORDS[change.verdict],
        ]
        for change in comparison.changes
        if change.column in columns
    ]
    lines = [table(("row", "number", "before", "after", "change", "verdict"), rows)]
    lines += [f"{each.what}: {each.before} -> {each.after}" for each in comparison.differences]
    for words, keys in (("before", comparison.only_before), ("after", comparison.only_after)):
        lines += [f"only {words}: {', '.join(f'{key} {value}' for key, value in row.items())}" for row in keys]
    notes = (line for note in comparison.notes for line in (printable(note), ""))
    return "\n".join([*notes, lines[0], "", *map(printable, lines[1:])])


def _parse_results(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    commands = parser.add_subparsers(dest="what", required=True)
    history = commands.add_parser("history", help="list saved results")
    history.add_argument("--bench", default="", metavar="NAME", help="only this bench")
    history.add_argument("--model", default="", metavar="NAME", help="only this model")
    history.add_argument("--limit", type=_whole, default=0, metavar="N", help="only the newest N (default: all)")
    show = commands.add_parser("show", help="print a result as a table")
    show.add_argument("result", help=_REFERENCE)
    show.add_argument("--csv", action="store_true", dest="as_csv", help="print CSV: one line per row and repeat")
    against = commands.add_parser("compare", help="compare two results of the same bench")
    against.add_argument("before", help=_REFERENCE)
    against.add_argument("after", help=_REFERENCE)
    against.add_argument(
        "--tie",
        type=_percent,
        default=100 * TIE,
        metavar="PERCENT",
        help="treat smaller changes as equal (default %(default)g)",
    )
    for command in (history, show, against):
        command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    for command in (show, against):
        command.add_argument(
            "--all", action="store_true", dest="everything", help="print all numbers, not only the main ones"
        )
    drawing = commands.add_parser("plot", help="draw a result as SVG")
    drawing.add_argument("result", help=_REFERENCE)
    drawing.add_argument(
        "--column", default="", metavar="NAME", help="number to draw (default: the first in the table)"
    )
    drawing.add_argument("--out", type=Path, metavar="FILE", help="output file (default: stdout)")
    forgetting = commands.add_parser("forget", help="delete a result")
    forgetting.add_argument("number", type=_whole, help="number in the history")
    return parser.parse_args(argv)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to 100")
    return value


_DESCRIPTION = (
    "Measure a model on this machine, or any server. 'ericllm bench NAME --help' lists the flags of a bench. "
    + " ".join(f"'{name}': {plan.about}." for name, plan in PLANS.items())
    + " Results are saved; 'history', 'show', 'compare', 'plot' and 'forget' (delete) use them."
)


def bench(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; returns 0, 130 where ctrl+c ended it. Raises EngineError for what cannot be measured."""
    if argv[:1] and argv[0] in PLANS:
        from console.cli.bench_measure import measure

        return measure(argv, parser)
    if not (argv[:1] and argv[0] in RESULT_COMMANDS):
        parser.description = _DESCRIPTION
        parser.add_argument("what", choices=(*PLANS, *RESULT_COMMANDS), help="bench, or command for saved results")
        what = parser.parse_args(argv).what
        parser.error(f"put the name first: {parser.prog} {what} ...")
    return show_results(argv, parser)
