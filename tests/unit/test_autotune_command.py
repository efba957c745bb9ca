"""What `ericllm autotune` prints, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.cli.autotune import Live, as_json, as_text, tune
from console.cli.main import main
from console.link.tuning import Failed, TuneOrder, TuningReport
from console.settings.schema import Settings
from console.tuning.autotune.record import Verdict
from console.tuning.autotune.space import Setting
from console.tuning.autotune.table import Outcome, remarks_of, sentences, shortened, table_of
from console.tuning.autotune.traffic import Mix
from console.tuning.profiles import TunedProfiles
from engine.models.resolve import resolve_local
from tests.fakes import tune_scenes

pytestmark = pytest.mark.long

DONE = tune_scenes.found("done")


class Terminal(io.StringIO):
    """A stream that is redrawn."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The lines that are left of what was written to a terminal that moves up and clears."""
    lines: list[str] = []
    for part in written.split("\x1b["):
        if part.startswith("J"):
            part = part[1:]
        elif (head := part.partition("F"))[1] and head[0].isdecimal():
            del lines[len(lines) - int(head[0]) :]
            continue
        lines += part.splitlines()
    return lines


def test_the_table_has_the_knobs_that_were_turned_and_marks_the_best_and_the_front() -> None:
    lines = as_text(DONE).splitlines()
    assert lines[0] == "NeuralHermes-7B: 540 settings of workers, max prompts, step tokens, cache bits"
    assert lines[1].startswith("Goal: highest tok/s, p95 of TTFT within 500 ms and of ITL within 50 ms; lengths as of")
    assert "threads" not in lines[3]
    assert [line.split()[0] for line in lines[4:12]].count("best") == 1
    assert [line.split()[0] for line in lines[4:12]].count("front") == 5
    assert lines[-1].startswith("1,420 tok/s; meets the latency SLO.")


def test_it_says_where_rates_and_latencies_lie_as_far_as_there_is_room() -> None:
    wide, narrow = table_of(DONE), table_of(DONE, columns=120)
    best = next(line for line in wide.splitlines() if line.startswith("best"))
    assert "1,377 to 1,463" in best and "342 to 418 ms" in best and "44 to 48 ms" in best
    assert (wide.splitlines()[0].count("95% within"), narrow.splitlines()[0].count("95% within")) == (3, 1)
    assert max(map(len, narrow.splitlines())) < 120


def test_settings_that_failed_are_told_with_their_reasons_and_so_are_windows_that_do_not_count() -> None:
    small, large = Setting(max_prompts=4), Setting(max_prompts=8)
    failed = [Failed(setting=each, reason="no request was answered") for each in (small, large)]
    failed += [Failed(setting=small, reason=f"short by {size} GiB") for size in range(6)]
    report = msgspec.structs.replace(
        DONE, failed=tuple(failed), notes=("changed by another operator: workers to 3: run discarded",)
    )
    lines = remarks_of(report)
    assert lines[0].startswith("changed by another operator: workers to 3")
    assert lines[1].endswith("prompts 4, step tokens 512, cache bits 16 and 1 more setting: no request was answered")
    assert lines[-1] == "2 more reasons for failed runs"
    assert lines[1] in as_text(report)


BEST = next(each for each in DONE.tried if each.best)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("1,420 tok/s; meets the latency SLO. Settings restored.", {}),
        ("1,420 tok/s. Settings restored.", {"asked": False}),
        (
            "1,420 tok/s; meets the latency SLO. Applied and saved as the default for this model.",
            {"apply": True, "applied": True},
        ),
        (
            "1,420 tok/s; meets the latency SLO. Applied, but not saved: no room.",
            {"apply": True, "applied": True, "unkept": "no room"},
        ),
        (
            "1,420 tok/s; meets the latency SLO. Settings restored. The result could not be saved: no room.",
            {"unkept": "no room"},
        ),
        (
            "1,420 tok/s; meets the latency SLO. The settings could not be applied: w0 died. "
            "The previous settings could not be restored: w1 died.",
            {"apply": True, "unapplied": "w0 died", "not_put_back": "w1 died."},
        ),
        (
            "Cancelled. Best so far: 1,420 tok/s; meets the latency SLO. Settings restored.",
            {"early": "cancelled"},
        ),
        ("Cancelled. Settings restored.", {"early": "cancelled", "best": None}),
    ],
)
def test_what_came_of_it_is_told_in_sentences(said: str, how: dict[str, Any]) -> None:
    assert sentences(Outcome(**{"best": BEST, "asked": True, **how})) == said


@pytest.mark.parametrize(("verdict", "does"), [("broken", "misses"), ("unsure", "probably misses")])
def test_a_best_that_breaks_the_slo_is_told_and_that_it_is_not_applied(verdict: Verdict, does: str) -> None:
    best = msgspec.structs.replace(BEST, verdict=verdict, keeps=False)
    said = sentences(Outcome(best=best, asked=True, apply=True))
    assert said == f"1,420 tok/s; {does} the latency SLO, closest of all runs. Not applied. Settings restored."


def test_of_a_long_table_the_best_and_the_front_are_kept() -> None:
    kept = shortened(DONE.tried, 3)
    assert [each.best for each in kept].count(True) == 1
    assert all(each.best or each.front for each in kept)
    assert "5 more, dominated" in table_of(DONE, 3)


def test_without_an_slo_the_heading_says_so() -> None:
    report = msgspec.structs.replace(DONE, slo_ttft_s=None, slo_itl_s=None)
    assert "Goal: highest tok/s, no latency SLO" in as_text(report)


def test_programs_get_everything() -> None:
    value = json.loads(as_json(DONE))
    assert msgspec.convert(value, TuningReport) == DONE


def test_on_a_terminal_the_table_is_drawn_in_place_of_the_one_before_and_taken_away_in_the_end() -> None:
    stream = Terminal()
    live = Live(stream, lambda: os.terminal_size((100, 24)))
    live.say("loading demo")
    live.show(tune_scenes.found())
    live.show(tune_scenes.found())
    shown = screen(stream.getvalue())
    assert sum("best" in line for line in shown) == 1
    assert not any("loading" in line for line in shown)
    assert all(len(line) < 100 for line in shown) and len(shown) < 24
    live.end()
    assert screen(stream.getvalue()) == []


def test_elsewhere_every_window_is_a_line() -> None:
    stream = io.StringIO()
    live = Live(stream)
    for windows in (1, 1, 2):
        live.show(msgspec.structs.replace(tune_scenes.found(), windows=windows))
    live.end()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("fine: 1 run, max 408 s left, trying workers 2, max prompts 32")


def test_a_trace_and_lengths_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "demo", "--trace", str(tmp_path / "none.json"), "--prompt", "8"]) == 2
    assert "--trace has its own lengths" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "demo", "--trace", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "not-a-model", "--minutes", "1"]) == 2
    assert "no model is called not-a-model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_interrupted_it_still_tells_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cli.autotune.state_dir", "runtime.logs.log_dir"):
        monkeypatch.setattr(f"console.{name}", lambda: tmp_path)
    reports: list[TuningReport] = []
    stream = io.StringIO()
    order = TuneOrder(knobs=("max_prompts",))
    mix = Mix(source="short", lengths=((16, 8),))
    settings = Settings(worker_host="thread")
    running = asyncio.create_task(tune(settings, order, mix, Live(stream), reports))
    async with asyncio.timeout(240):
        while "1 run," not in stream.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (reports[0].state, len(reports[0].tried) >= 1) == ("cancelled", True)
    said = reports[0].outcome
    assert said.startswith("Cancelled. Best so far: ") and "Settings restored." in said
    assert said in as_text(reports[0])
    assert not TunedProfiles(tmp_path).knows(str(resolve_local("demo", ())))
    assert '"applied": false' in (tmp_path / "tuned.json").read_text()
