"""Two results of the same bench, number by number: what changed, and what the noise alone may have changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from console.bench.result import BenchResult, Column, Key, Row, Setting, key_texts
from console.bench.text import figure as number
from console.bench.text import key_text
from engine.errors import InvalidRequest

_MIN_REPEATS = 2
TIE = 0.1
"""Runs apart in time differ by as much on a machine that has other work too."""

WORK = frozenset(
    {
        *("prompts", "requests", "concurrent", "prompt_tokens", "output_tokens", "stream_tokens", "trace"),
        *("prefix_tokens", "prefix_groups", "prefix_share", "burstiness", "max_concurrent"),
    }
)
"""Settings that say what was asked: where they differ, the numbers are of other work."""
LIMITS = frozenset({"slo_ttft", "slo_tpot", "slo_response"})
"""Settings that only numbers of an SLO rest on."""
_OF_LIMITS = ("request_goodput", "slo_attainment")

Verdict = Literal["better", "worse", "changed", "same", "unclear"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One number, before and after: medians, and the least and the most of the repeats.

    verdict: "unclear" where one of both has a single repeat, so that the noise is unknown, or where it is of other
    work; "same" where the repeats of both overlap, or where the medians are closer than the tie; otherwise which way it
    went, "changed" where neither is better.
    """

    keys: dict[str, Key]
    column: str
    before: float
    after: float
    before_spread: tuple[float, float]
    after_spread: tuple[float, float]
    verdict: Verdict

    @property
    def share(self) -> float | None:
        """after - before as a share of before; None where that was 0."""
        return (self.after - self.before) / abs(self.before) if self.before else None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something besides the numbers that is not the same in both."""

    what: str
    before: str
    after: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two results of one bench. changes: in the order of the table.  only_before, only_after: keys of rows that the
    other lacks.  notes: why changes are unclear, for a person to read first."""

    name: str
    columns: tuple[Column, ...]
    keys: tuple[Column, ...]
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    only_before: tuple[dict[str, Key], ...]
    only_after: tuple[dict[str, Key], ...]
    notes: tuple[str, ...] = ()


def compare(before: BenchResult, after: BenchResult, tie: float = TIE) -> Comparison:
    """tie: a smaller share of the median is no change. Raises InvalidRequest for results of two different benches, or
    that have no row in common."""
    if before.name != after.name:
        raise InvalidRequest(
            f"results of different benches cannot be compared: {before.name}, {after.name}",
            param="file",
        )
    rows = [(row, found) for row in before.rows if (found := _like(row, after)) is not None]
    if not rows:
        raise InvalidRequest("no common rows to compare", param="file")
    columns = tuple(column for column in before.columns if after.column(column.name) is not None)
    differences = tuple(_differences(before, after))
    work, limits = (tuple(each for each in differences if each.what in names) for names in (WORK, LIMITS))
    unclear = [column for column in columns if work or (limits and column.name in _OF_LIMITS)]
    changes = tuple(
        change
        for row, found in rows
        for column in columns
        if (change := _change(row, found, column, tie, judged=column not in unclear)) is not None
    )
    return Comparison(
        name=before.name,
        columns=columns,
        keys=before.keys,
        differences=differences,
        changes=changes,
        only_before=tuple(row.keys for row in before.rows if _like(row, after) is None),
        only_after=tuple(row.keys for row in after.rows if _like(row, before) is None),
        notes=tuple(_notes(work, limits, single=before.repeats < _MIN_REPEATS or after.repeats < _MIN_REPEATS)),
    )


def same_work(one: BenchResult, other: BenchResult, column: str) -> bool:
    """Return whether both have the same settings, as far as this number depends on them."""
    matters = WORK | LIMITS if column in _OF_LIMITS else WORK
    return all(_setting_text(one.settings.get(name)) == _setting_text(other.settings.get(name)) for name in matters)


def _like(row: Row, result: BenchResult) -> Row | None:
    return next((other for other in result.rows if other.keys == row.keys), None)


def _change(row: Row, found: Row, column: Column, tie: float, *, judged: bool) -> Change | None:
    """None where a row lacks the number. judged: False for a number of other work."""
    before, before_spread = row.median(column.name), row.spread(column.name)
    after, after_spread = found.median(column.name), found.spread(column.name)
    if before is None or after is None or before_spread is None or after_spread is None:
        return None
    change = Change(
        keys=row.keys,
        column=column.name,
        before=before,
        after=after,
        before_spread=before_spread,
        after_spread=after_spread,
        verdict="unclear",
    )
    repeats = min(len(row.numbers(column.name)), len(found.numbers(column.name)))
    judged = judged and repeats >= _MIN_REPEATS
    return msgspec.structs.replace(change, verdict=_verdict(change, column, tie)) if judged else change


def _notes(work: Sequence[Difference], limits: Sequence[Difference], *, single: bool) -> Iterator[str]:
    if work:
        yield f"Different workloads, so no number is better or worse: {_listed(work)}."
    elif limits:
        yield f"Different SLOs, so goodput is not better or worse: {_listed(limits)}."
    if single:
        yield "One repeat has no spread: measure both with --repeats 5."


def _listed(differences: Sequence[Difference]) -> str:
    return ", ".join(f"{each.what} {each.before} -> {each.after}" for each in differences)


def _verdict(change: Change, column: Column, tie: float) -> Verdict:
    before, after = change.before, change.after
    overlap = change.before_spread[0] <= change.after_spread[1] and change.after_spread[0] <= change.before_spread[1]
    if overlap or abs(after - before) <= tie * abs(before):
        return "same"
    if not column.better:
        return "changed"
    return "better" if (after > before) == (column.better == "higher") else "worse"


def _differences(before: BenchResult, after: BenchResult) -> Iterator[Difference]:
    pairs: list[tuple[str, Setting, Setting]] = [
        ("cpu", before.machine.cpu, after.machine.cpu),
        ("cores", before.machine.cores, after.machine.cores),
        ("devices", _devices(before), _devices(after)),
        ("ericllm", before.versions.ericllm, after.versions.ericllm),
        ("torch", before.versions.torch, after.versions.torch),
        ("target", _target(before), _target(after)),
        ("dtype", before.target.dtype, after.target.dtype),
        ("seeds", [*before.seeds], [*after.seeds]),
        ("complete", before.complete, after.complete),
    ]
    for name in dict.fromkeys((*before.settings, *after.settings)):
        pairs.append((name, before.settings.get(name), after.settings.get(name)))
    for what, one, other in pairs:
        if _setting_text(one) != _setting_text(other):  # a setting that is not there yet says as little as an empty one
            yield Difference(what=what, before=_setting_text(one), after=_setting_text(other))


def _devices(result: BenchResult) -> str:
    return ", ".join(device.name for device in result.machine.devices)


def _target(result: BenchResult) -> str:
    return " ".join(filter(None, (result.target.model, result.target.dialect, result.target.url)))


def _setting_text(value: Setting) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


# A result in a few words, for a list of results. Pure.

_BEST_COUNTS = ("threads", "grid")
"""Benches that look for the best row; of the others the last one, which asks the most, is what they are about."""


def headline(result: BenchResult) -> str:
    """The figure that one looks for first: "1,420.0 tok/s, workers 2, max prompts 16"; "" where there is none."""
    column = next((each for each in result.columns if each.shown and each.better), None)
    row = main_row(result, column) if column is not None else None
    if column is None or row is None:
        return ""
    which = ", ".join(f"{key.title} {key_text(row.keys[key.name])}" for key in result.keys if key.name in row.keys)
    figure = f"{number(row.median(column.name) or 0.0, column)} {column.unit}".rstrip()
    return ", ".join(filter(None, (f"{figure} {column.title}", which if len(result.rows) > 1 else "")))


def main_row(result: BenchResult, column: Column) -> Row | None:
    """The row that a bench is about, of those that have the number; None where none has."""
    rows = [row for row in result.rows if row.numbers(column.name)]
    if not rows or result.name not in _BEST_COUNTS:
        return rows[-1] if rows else None
    choose = max if column.better == "higher" else min
    return choose(rows, key=lambda row: row.median(column.name) or 0.0)


def settings_text(result: BenchResult) -> str:
    """The settings as text: "1×16, 4 requests, 128+32 tokens, 3 repeats"."""
    settings = result.settings
    workers, max_prompts = settings.get("num_workers"), settings.get("max_prompts")
    places = f"{workers}×{max_prompts}" if isinstance(workers, int) and isinstance(max_prompts, int) else ""
    requests = f"{settings['requests']} requests" if "requests" in settings else ""
    tokens = f"{settings['prompt_tokens']}+{settings['output_tokens']} tokens" if "output_tokens" in settings else ""
    repeats = f"{result.repeats} repeats" if result.repeats > 1 else ""
    return ", ".join(filter(None, (places, requests, tokens, repeats)))


# One row of a bench over the results that have it: what became of it from run to run. Pure.

_KEYS = (Column(name="number", title="#", digits=0), Column(name="started", title="started (UTC)"))


@dataclass(frozen=True, slots=True)
class Trend:
    """row: which one of the results it is, for a person.  found: a row for each result that has it.

    left_out: number of results of other work, which cannot be compared.
    """

    row: str
    found: BenchResult
    left_out: int

    @property
    def about(self) -> str:
        """The title of its plot after the number."""
        others = (
            f", {self.left_out} result{'s' * (self.left_out != 1)} with other workloads left out"
            if self.left_out
            else ""
        )
        return f" of {self.row}, over time{others}"


def trend(shown: BenchResult, column: Column, results: Mapping[int, BenchResult]) -> Trend:
    """The main row of `shown` in results by their numbers, in their order."""
    about = main_row(shown, column)
    having = {
        number: (result, row)
        for number, result in results.items()
        for row in result.rows
        if about is not None and row.keys == about.keys and row.numbers(column.name)
    }
    rows = [
        Row(
            keys={"number": number, "started": f"{result.started[:10]} {result.started[11:16]}"},
            values={column.name: row.values[column.name]},
        )
        for number, (result, row) in having.items()
        if same_work(shown, result, column.name)
    ]
    return Trend(
        row=key_texts(about.keys) if about is not None else "",
        found=msgspec.structs.replace(shown, keys=_KEYS, columns=(column,), rows=tuple(rows)),
        left_out=len(having) - len(rows),
    )
