"""Where a plot puts things: marks of the axis under the points that they name."""

from __future__ import annotations

import csv
import io
import itertools
import math
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

from console.bench.export import WIDTH, csv_text, plot
from console.bench.result import BenchResult, Column, Key, Row
from engine.text.printable import ANY_UNSAFE
from tests.unit.test_bench_history import made


def over(*keys: Key) -> BenchResult:
    """A row for each key."""
    return made({}, rows=tuple(Row(keys={"users": key}, values={"tok_s": [5.0]}) for key in keys))


def marks(drawn: str) -> dict[str, float]:
    """Where the marks of the axis lie, by what they say."""
    found = [each for each in ElementTree.fromstring(drawn).iter() if each.get("class") == "tick middle"]
    return {each.text or "": float(each.get("x", "nan")) for each in found}


def dots(drawn: str) -> list[float]:
    """Where the points lie, from left to right."""
    return [float(each.get("cx", "nan")) for each in ElementTree.fromstring(drawn).iter() if each.get("r") == "3.5"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((1.0, 4.0, "inf"), ["1", "4", "inf"]),
        ((0.5, 2.0, 32.0), ["0.5", "2", "32"]),
        ((1, 2, 3, 5, 7, 9), ["1", "2", "3", "5", "7", "9"]),
        (("4", "16", "own"), ["4", "16", "own"]),
        ((24,), ["24"]),
    ],
)
def test_every_mark_is_under_its_point_and_none_upon_another(keys: tuple[Key, ...], said: list[str]) -> None:
    drawn = plot(over(*keys))
    found = marks(drawn)
    assert list(found) == said
    assert list(found.values()) == dots(drawn)
    assert len(set(found.values())) == len(keys)
    assert all(0 < x < WIDTH for x in found.values())


def test_a_rate_without_end_is_as_far_from_the_last_as_that_from_the_first() -> None:
    first, second, last = marks(plot(over(1.0, 4.0, "inf"))).values()
    assert math.isclose(second - first, last - second, abs_tol=0.1)
    assert last - first > WIDTH / 2


@pytest.mark.parametrize("count", [2, 4, 6])
def test_no_name_of_a_line_lies_upon_another_or_beyond_the_edge(count: int) -> None:
    keys = (Column(name="guessed", title="guessed ahead"), Column(name="users", title="users"))
    rows = tuple(
        Row(keys={"users": users, "guessed": guessed}, values={"tok_s": [5.0]})
        for guessed in range(count)
        for users in (1, 4)
    )
    texts = ElementTree.fromstring(plot(made({}, rows=rows, keys=keys))).iter()
    names = [each for each in texts if (each.text or "").startswith("guessed ahead")]
    places = sorted((float(each.get("y", "nan")), float(each.get("x", "nan"))) for each in names)
    assert len(places) == count
    for (line, left), (next_line, right) in itertools.pairwise(places):
        assert line != next_line or right - left > 100
    assert all(x + 100 < WIDTH for _, x in places)


def test_what_another_instance_calls_its_result_is_text_in_every_file() -> None:
    name = "=cmd|' /c x'!A1\x1b]52;c;QQ==\x07<script>"
    keys = (Column(name="@users", title="<b>\x9b2J"),)
    rows = (Row(keys={"@users": name}, values={"tok_s": [-5.0]}),)
    result = msgspec.structs.replace(made({}, rows=rows), name=name, started="+1", keys=keys)
    drawn = plot(result)
    assert [each.tag for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith(("script", "b"))] == []
    assert ANY_UNSAFE.search(drawn.replace("\n", "")) is None
    lines = [*csv.reader(io.StringIO(csv_text(result)))]
    assert lines[0][:3] == ["bench", "started", "'@users"]
    assert lines[1][:4] == [f"'{name}", "'+1", f"'{name}", "1"]
    assert "-5.0" in lines[1], "numbers stay numbers"
