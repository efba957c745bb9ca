"""What draws the plots of docs/tuning.md: every turn is a row, repeats come together, every plot has its number."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.bench.export import plot
from console.bench.result import BenchResult, Row, TargetInfo, encode_result, read_result
from console.bench.run import these_versions, this_machine
from console.settings.schema import Settings
from console.settings.sources import changed, load_settings
from tools.performance.tuning_plots import DOCS, Sweep, Turn, drawn, joined, shortened, sweeps

SWEEPS = sweeps()
TURNED = {name: sweep for name, sweep in SWEEPS.items() if sweep.turns}


@pytest.fixture
def settings() -> Settings:
    return load_settings({"model": "demo"}, env={}, file=Path("nowhere.toml"))


def result_of(sweep: Sweep, turn: int, repeat: int) -> BenchResult:
    """As the sweep's plan would give it at one turn: a row for each value of the keys that are kept."""
    values = {column: [100.0 * turn + repeat] for column in sweep.plots.values()}
    kept = [dict.fromkeys(sweep.fixed, users) for users in ((1, 8) if sweep.fixed else (0,))]
    return BenchResult(
        name=sweep.plan.name,
        started="2026-11-22T10:00:00+00:00",
        duration_s=1.0,
        machine=this_machine(),
        versions=these_versions(),
        target=TargetInfo(kind="engine", model="demo"),
        settings={"max_prompts": 8, "cache_bits": 8},
        seeds=[0],
        keys=sweep.plan.keys,
        columns=sweep.plan.columns,
        rows=tuple(Row(keys=dict(keys), values=values) for keys in kept),
    )


def swept(sweep: Sweep, repeats: int = 3) -> BenchResult:
    found = [
        (turn, result_of(sweep, number, repeat)) for repeat in range(repeats) for number, turn in enumerate(sweep.turns)
    ]
    return joined(sweep, found)


@pytest.mark.parametrize("name", TURNED)
def test_every_turn_is_a_row_with_all_its_repeats(name: str) -> None:
    sweep = TURNED[name]
    result = swept(sweep)
    assert len(result.rows) == len(sweep.turns) * (2 if sweep.fixed else 1)
    column = next(iter(sweep.plots.values()))
    assert result.rows[0].values[column] == [0.0, 1.0, 2.0]
    assert result.rows[-1].values[column] == [100.0 * (len(sweep.turns) - 1) + repeat for repeat in range(3)]
    assert [column.name for column in result.keys] == list(result.rows[0].keys)


def test_a_setting_that_was_turned_is_told_by_the_rows_alone() -> None:
    assert swept(SWEEPS["cache_bits"]).settings == {}
    assert swept(SWEEPS["threads"]).settings == {"max_prompts": 8, "cache_bits": 8}


@pytest.mark.parametrize("name", TURNED)
def test_every_turn_is_a_setting_that_the_program_takes(name: str, settings: Settings) -> None:
    for turn in TURNED[name].turns:
        taken = changed(settings, turn.settings)
        assert {knob: getattr(taken, knob) for knob in turn.settings} == turn.settings


def test_the_same_memory_holds_more_places_of_fewer_bits() -> None:
    turns = [turn.settings for turn in SWEEPS["cache_bits"].turns if turn.keys["same"] == "memory"]
    assert {turn["cache_bits"] * turn["max_prompts"] for turn in turns} == {128}


@pytest.mark.parametrize("name", TURNED)
def test_a_knob_leaves_its_result_and_its_plots(name: str, tmp_path: Path) -> None:
    sweep, result = TURNED[name], swept(TURNED[name])
    files = drawn(name, sweep, result, tmp_path)
    assert [file.suffix for file in files] == [".json", *[".svg"] * len(sweep.plots)]
    assert encode_result(read_result(files[0])) == encode_result(result)
    assert [file.read_text() for file in files[1:]] == [plot(result, column) for column in sweep.plots.values()]


def test_a_plot_that_the_page_shows_is_one_that_is_made() -> None:
    made = {f"tuning-{file}.svg" for sweep in SWEEPS.values() for file in sweep.plots}
    assert {file.name for file in DOCS.glob("tuning-*.svg")} <= made


@pytest.mark.parametrize("name", SWEEPS)
def test_a_short_look_has_at_most_two_turns(name: str) -> None:
    short = shortened(SWEEPS[name])
    assert short.turns == (*SWEEPS[name].turns[:1], *SWEEPS[name].turns[-1:])
    assert short.turns or msgspec.structs.asdict(short.plan) != msgspec.structs.asdict(SWEEPS[name].plan)


def test_one_turn_is_measured_once_in_a_short_look() -> None:
    alone = Sweep(SWEEPS["threads"].plan, {}, turns=(Turn({"threads": 1}, {"threads": 1}),))
    assert shortened(alone).turns == alone.turns
