"""Results of benches that were kept: compared, drawn, as CSV, and in the history."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sqlite3
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.bench.comparison import LIMITS, WORK, compare
from console.bench.export import csv_text, plot
from console.bench.history import FILE, BenchHistory, BenchHistoryError
from console.bench.kinds import PLANS
from console.bench.result import BenchResult, Column, MachineInfo, Row, TargetInfo, Versions, encode_result, write_file
from console.cli.bench import comparison_text, find_result, show_results
from engine.errors import InvalidRequest

RATE = Column(name="tok_s", title="throughput", unit="tok/s", better="higher")
TTFT = Column(name="ttft_ms", title="TTFT", unit="ms", better="lower")
COUNT = Column(name="requests", title="requests", digits=0)


def made(rates: dict[int, list[float | None]], **changed: Any) -> BenchResult:
    """A result of `bench users`: by users, the throughput of each repeat."""
    rows = tuple(
        Row(keys={"users": users}, values={"tok_s": values, "ttft_ms": [10.0] * len(values)})
        for users, values in rates.items()
    )
    base = BenchResult(
        name="users",
        started="2026-03-01T12:30:00Z",
        duration_s=12.0,
        machine=MachineInfo(cpu="Some CPU", cores=2, ram_bytes=1 << 34),
        versions=Versions(ericllm="1.0", python="3.11"),
        target=TargetInfo(kind="engine", model="demo"),
        settings={"requests": 64},
        seeds=[7],
        keys=(Column(name="users", title="users"),),
        columns=(RATE, TTFT, COUNT),
        rows=rows,
    )
    return msgspec.structs.replace(base, **changed)


def verdict(before: list[float | None], after: list[float | None], column: Column = RATE) -> str:
    """Of one row's change."""
    one, other = (made({1: []}, columns=(column,), rows=(_row(column, each),)) for each in (before, after))
    return compare(one, other).changes[0].verdict


def _row(column: Column, values: list[float | None]) -> Row:
    return Row(keys={"users": 1}, values={column.name: values})


@pytest.mark.parametrize(
    ("before", "after", "column", "expected"),
    [
        ([100, 101, 102], [150, 151, 152], RATE, "better"),
        ([100, 101, 102], [50, 51, 52], RATE, "worse"),
        ([100, 101, 102], [150, 151, 152], TTFT, "worse"),
        ([100, 101, 102], [50, 51, 52], TTFT, "better"),
        ([100, 101, 102], [150, 151, 152], COUNT, "changed"),
        ([100, 101, 160], [150, 151, 152], RATE, "same"),
        ([100, 101, 102], [106, 107, 108], RATE, "same"),
        ([100, None, 101], [150, 151], RATE, "better"),
        ([100], [150, 151], RATE, "unclear"),
        ([100, 101], [150, None], RATE, "unclear"),
    ],
)
def test_a_number_has_changed_where_neither_repeats_nor_the_tie_explain_it(
    before: list[float | None], after: list[float | None], column: Column, expected: str
) -> None:
    assert verdict(before, after, column) == expected


def test_a_comparison_says_what_else_is_not_the_same() -> None:
    before = made({1: [10.0], 2: [20.0]})
    after = made({2: [20.0], 4: [40.0]}, settings={"requests": 32}, seeds=[8])

    found = compare(before, after)

    assert [(each.what, each.before, each.after) for each in found.differences] == [
        ("seeds", "7", "8"),
        ("requests", "64", "32"),
    ]
    assert found.only_before == ({"users": 1},) and found.only_after == ({"users": 4},)
    assert {change.column for change in found.changes} == {"tok_s", "ttft_ms"}


@pytest.mark.parametrize("repeats", [1, 3])
def test_with_one_repeat_there_is_no_verdict_and_it_is_said_why(repeats: int) -> None:
    found = compare(made({1: [10.0] * repeats}), made({1: [20.0] * repeats}))
    assert (found.changes[0].verdict == "unclear") == (repeats == 1)
    assert any("One repeat has no spread" in note for note in found.notes) == (repeats == 1)


def test_numbers_of_other_work_are_not_judged_and_what_was_asked_is_said_first() -> None:
    before, after = (
        made({1: [rate, rate]}, settings={"output_tokens": asked}) for rate, asked in ((9, "50"), (99, "8"))
    )
    found = compare(before, after)
    assert {change.verdict for change in found.changes} == {"unclear"}
    assert found.notes == ("Different workloads, so no number is better or worse: output_tokens 50 -> 8.",)
    assert comparison_text(found).startswith(found.notes[0])


def test_another_slo_leaves_goodput_alone_unjudged() -> None:
    goodput = Column(name="request_goodput", title="goodput", better="higher")
    rows = [(Row(keys={}, values={"request_goodput": [r, r], "tok_s": [r, r]}),) for r in (1.0, 2.0)]
    before, after = (
        made({}, columns=(RATE, goodput), rows=row, settings={"slo_ttft": limit})
        for row, limit in zip(rows, (0.1, 0.5), strict=True)
    )
    found = compare(before, after)
    assert {change.column: change.verdict for change in found.changes} == {
        "tok_s": "better",
        "request_goodput": "unclear",
    }
    assert found.notes == ("Different SLOs, so goodput is not better or worse: slo_ttft 0.1 -> 0.5.",)


def test_every_setting_of_a_bench_is_known_to_say_what_was_asked_or_not() -> None:
    rows = {key.name for plan in PLANS.values() for key in plan.keys}
    others = {"users", "clients", "rates", "guessed", "repeats", "seed"}
    told = {name for plan in PLANS.values() for name in plan.__struct_fields__}
    assert told == (told & (WORK | LIMITS | rows | others)) and told >= WORK | LIMITS


def test_results_of_two_benches_are_not_compared() -> None:
    with pytest.raises(InvalidRequest, match="different benches cannot be compared: users, grid"):
        compare(made({1: [1.0]}), made({1: [1.0]}, name="grid"))
    with pytest.raises(InvalidRequest, match="no common rows"):
        compare(made({1: [1.0]}), made({2: [1.0]}))


def test_csv_has_a_line_for_each_row_and_repeat(tmp_path: Path) -> None:
    result = made({1: [10.0, 11.0], 2: [20.0, None]})

    lines = list(csv.DictReader(io.StringIO(csv_text(result))))

    assert [(line["users"], line["repeat"], line["tok_s"]) for line in lines] == [
        ("1", "1", "10.0"),
        ("1", "2", "11.0"),
        ("2", "1", "20.0"),
        ("2", "2", ""),
    ]
    write_file(tmp_path / "out.csv", csv_text(result).encode(), "csv")
    assert (tmp_path / "out.csv").read_text() == csv_text(result)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_file(tmp_path / "out.csv" / "below.csv", b"", "csv")


def test_a_plot_has_a_point_for_each_row_and_a_line_for_each_series() -> None:
    rows = tuple(
        Row(keys={"workers": workers, "users": users}, values={"tok_s": [users * 10.0, users * 11.0]})
        for workers in (1, 2)
        for users in (1, 8, 32)
    )
    keys = (Column(name="workers", title="workers"), Column(name="users", title="users"))

    drawn = ElementTree.fromstring(plot(made({}, rows=rows, keys=keys)))

    tags = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    lines = [element for element in drawn.iter() if element.get("class", "").endswith(" line")]
    dots = [element for element in drawn.iter() if element.get("r") == "3.5"]
    assert tags[0] == "svg" and len(lines) == 2 and len(dots) == 6
    xs = [float(dot.get("cx", "")) for dot in dots[:3]]
    assert xs == sorted(xs) and xs[1] - xs[0] == pytest.approx((xs[2] - xs[0]) * 0.6, abs=0.2)  # by doublings
    assert "workers 2" in {element.text for element in drawn.iter()}


def test_a_plot_of_words_gives_each_its_place() -> None:
    rows = tuple(Row(keys={"users": name}, values={"tok_s": [5.0]}) for name in ("one & two", "three"))
    texts = {element.text for element in ElementTree.fromstring(plot(made({}, rows=rows))).iter()}
    assert {"one & two", "three"} <= texts


def lines_of(drawn: str) -> int:
    """Between points."""
    return sum(element.get("class", "").endswith(" line") for element in ElementTree.fromstring(drawn).iter())


def test_no_line_joins_what_nothing_lies_between() -> None:
    def result(*names: str | float) -> BenchResult:
        return made({}, rows=tuple(Row(keys={"users": name}, values={"tok_s": [5.0]}) for name in names))

    assert [lines_of(plot(result("own", "shared"))), lines_of(plot(result(1.0, "inf")))] == [0, 1]


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (0.8, ("0.16", "0.32", "0.48", "0.64", "0.80")),
        (8.0, ("1.6", "3.2", "4.8", "6.4", "8.0")),
        (100.0, ("20", "40", "60", "80", "100")),
    ],
)
def test_ticks_have_as_many_digits_as_their_step_needs(top: float, ticks: tuple[str, ...]) -> None:
    drawn = ElementTree.fromstring(plot(made({1: [top]})))
    told = [element.text for element in drawn.iter() if element.get("class") == "tick end"]
    assert told[1:] == list(ticks)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="no numbers named speed; available: tok_s, ttft_ms"):
        plot(made({1: [1.0]}), "speed")
    with pytest.raises(InvalidRequest, match="no numbers to draw"):
        plot(made({}))


def test_the_history_keeps_results_whole_and_lists_the_newest_first(tmp_path: Path) -> None:
    history = BenchHistory(tmp_path / "new")
    assert history.results() == []
    first, second = made({1: [1.0]}), made({1: [2.0]}, name="grid", target=TargetInfo(kind="http", model="m", url="u"))

    numbers = [history.add(first), history.add(second)]

    assert [kept.id for kept in history.results()] == numbers[::-1]
    assert [kept.id for kept in history.results(name="users")] == numbers[:1]
    assert [kept.id for kept in history.results(model="m", limit=5)] == numbers[1:]
    assert history.result(numbers[1]) == second
    history.remove(numbers[0])
    with pytest.raises(InvalidRequest, match=f"no result {numbers[0]}"):
        history.result(numbers[0])


@pytest.mark.parametrize("number", [0, -1, 2**63, -(2**63) - 1, 99999999999999999999])
def test_a_number_that_the_history_does_not_have_is_one_sentence_however_large(tmp_path: Path, number: int) -> None:
    history = BenchHistory(tmp_path)
    history.add(made({1: [1.0]}))
    for look_up in (history.result, history.remove):
        with pytest.raises(InvalidRequest, match=f"no result {number}"):
            look_up(number)
    assert len(history.results(limit=10**30)) == 1


def test_a_history_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 200)
    with pytest.raises(BenchHistoryError, match="cannot be read"):
        BenchHistory(tmp_path).results()


def test_a_history_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(BenchHistoryError, match="newer version"):
        BenchHistory(tmp_path).add(made({1: [1.0]}))


def test_a_result_is_named_by_file_number_or_last(tmp_path: Path) -> None:
    history = BenchHistory(tmp_path)
    with pytest.raises(InvalidRequest, match="has 0 results, so last does not exist"):
        find_result("last", history)
    older, newer = made({1: [1.0]}), made({1: [2.0]})
    number = history.add(older)
    history.add(newer)
    write_file(tmp_path / "r.json", encode_result(newer), "json")
    assert find_result(str(number), history) == older == find_result("last~1", history)
    assert find_result("last", history) == newer == find_result(str(tmp_path / "r.json"), history)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        find_result("nothing.json", history)


def said(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> str:
    """What `ericllm bench ...` prints."""
    assert show_results(argv, argparse.ArgumentParser(), folder) == 0
    return capsys.readouterr().out


def test_the_command_shows_compares_and_draws_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No saved results" in said(capsys, tmp_path, "history")
    history = BenchHistory(tmp_path)
    number = history.add(made({1: [100.0, 102.0]}, notes=("a note",)))
    history.add(made({1: [200.0, 202.0]}))

    assert said(capsys, tmp_path, "history").count("demo") == 2
    assert len(json.loads(said(capsys, tmp_path, "history", "--json", "--limit", "1"))) == 1
    shown = said(capsys, tmp_path, "show", str(number))
    assert "throughput (tok/s)" in shown and "cores" not in shown
    assert "101.0" in shown and "a note" in shown and "2 repeats" in shown
    assert said(capsys, tmp_path, "show", "last", "--csv").startswith("bench,started,users")
    compared = said(capsys, tmp_path, "compare", "last~1", "last")
    assert "+99.0%" in compared and "better" in compared
    assert "same" in said(capsys, tmp_path, "compare", "last~1", "last", "--tie", "99.5")
    assert said(capsys, tmp_path, "plot", "last").startswith("<svg")
    assert "saved " in said(capsys, tmp_path, "plot", "last", "--out", str(tmp_path / "p.svg"))
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert said(capsys, tmp_path, "forget", str(number)) == f"result {number} deleted\n"
    assert len(history.results()) == 1


@pytest.mark.parametrize("text", ["9" * 5000, f"last~{'9' * 5000}"])
def test_a_number_too_long_to_be_read_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: File name too long"):
        find_result(text, BenchHistory(tmp_path))
