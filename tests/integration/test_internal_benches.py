"""`python -m tools.internal_benches`: the shape of its reports, independent of the numbers."""

from __future__ import annotations

import json
import os
import pstats
from pathlib import Path

import pytest

from console.bench.text import table
from engine.errors import InvalidRequest, WorkerFailed
from tests.fakes.tiny_models import make_tiny_model
from tools.internal_benches.__main__ import main
from tools.internal_benches.api_overhead import http_text, measure_http
from tools.internal_benches.bare_backend import BareLoop
from tools.internal_benches.engine_overhead import OverheadReport, WaitingReport, overhead_text
from tools.internal_benches.http_server import ServerOptions, ServerProcess
from tools.internal_benches.rounds import PROMPT_TOKENS, Rounds, Spread, request_numbers
from tools.internal_benches.time_accounting import accounting_text, measure_accounting
from tools.internal_benches.workers import measure_workers, workers_text

SMALL = ("--rounds", "1", "--concurrent", "2", "--waiting", "100", "--threads", "1")


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ERICLLM_CONFIG", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bench") / "tiny", num_hidden_layers=1)


@pytest.mark.slow
def test_overhead_reports_both_ways_and_the_memory_of_a_waiting_request(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["overhead", "--model", str(tiny), *SMALL, "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["model"], report["threads"], report["concurrent"], report["rounds"]) == ("tiny", 1, 2, 1)
    for name in ("bare", "engine", "bare_cpu_us", "worker_cpu_us", "engine_cpu_us"):
        assert report[name]["median"] > 0
    assert report["overhead"]["median"] == pytest.approx(1 - report["engine"]["median"] / report["bare"]["median"])
    memory = report["memory"]
    assert (memory["waiting"], memory["prompt_tokens"]) == (100, PROMPT_TOKENS)
    assert 0 < memory["traced_bytes"] < 8 * 1024
    assert "round 1 of 1" in said.err


@pytest.mark.slow
async def test_accounting_reports_the_engine_with_it_and_without(tiny: Path) -> None:
    report = await measure_accounting(Rounds.on(str(tiny), threads=1, count=1), 2, lambda text: None)
    for side in (report.with_accounting, report.without):
        assert min(side.tokens_per_s.median, side.worker_cpu_us.median, side.engine_cpu_us.median) > 0
    assert report.overhead.median == pytest.approx(
        1 - report.with_accounting.tokens_per_s.median / report.without.tokens_per_s.median
    )
    assert 0 < report.cpu_share < 1
    assert "The accounting alone" in accounting_text(report)


@pytest.mark.slow
async def test_workers_reports_every_way_and_memory_that_is_shared(tiny: Path) -> None:
    rounds = Rounds.on(str(tiny), threads=2, count=1)
    said: list[str] = []
    report = await measure_workers(rounds, said.append, concurrent=(1, 2), memory_of=(1, 2))
    assert [(rate.workers, rate.threads_each, rate.concurrent) for rate in report.rates] == [
        (1, 2, 1),
        (2, 1, 1),
        (1, 2, 2),
        (2, 1, 2),
    ]
    assert all(rate.tokens_per_s.median > 0 for rate in report.rates)
    assert [each.workers for each in report.memory] == [1, 2]
    assert all(each.pss_bytes is None or 0 < each.pss_bytes < each.rss_bytes for each in report.memory)
    assert said[-1] == "round 1 of 1"
    text = workers_text(report)
    assert "1 x 2 threads" in text
    assert "2 x 1 threads" in text


async def test_two_workers_on_one_thread_are_refused(tiny: Path) -> None:
    with pytest.raises(InvalidRequest, match="as many threads"):
        await measure_workers(Rounds.on(str(tiny), threads=1, count=1), lambda text: None)


def test_both_ways_get_the_same_requests_and_no_two_share_a_page(tiny: Path) -> None:
    rounds = Rounds.on(str(tiny), threads=1, count=1)
    numbers = [*request_numbers(0, 4), *request_numbers(1, 4)]
    assert numbers == list(range(16))
    engine = [rounds.engine_request(number) for number in numbers]
    backend = list(rounds.backend_requests(numbers))
    assert [(list(each.prompt_ids), each.params) for each in engine] == [(b.prompt_ids, b.params) for b in backend]
    assert len({tuple(each.prompt_ids[:16]) for each in backend}) == len(backend)
    assert all(0 <= token < rounds.model.vocab_size for each in backend for token in each.prompt_ids)


@pytest.mark.slow
async def test_a_bare_loop_that_cannot_load_says_why(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "cut", num_hidden_layers=1)
    rounds = Rounds.on(str(folder), threads=1, count=1)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WorkerFailed, match=r"ended: cut cannot be loaded: .* truncated or damaged"):
        async with BareLoop(rounds, 1):
            pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["overhead", "--model", "no-such-model"], "no-such-model"),
        (["overhead", "--rounds", "0"], "0 is not a positive whole number"),
        (["overhead", "--concurrent", "many"], "many is not a positive whole number"),
        (["sideways"], "sideways"),
        ([], "required: bench"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert reason in printed.err.strip().splitlines()[-1]


def test_the_report_for_a_person_has_every_number() -> None:
    of = Spread.of
    text = overhead_text(
        OverheadReport(
            model="demo",
            dtype="bfloat16",
            threads=2,
            concurrent=32,
            rounds=3,
            bare=of([3000, 3100, 2900]),
            engine=of([2900, 2910, 2890]),
            overhead=of([0.03, 0.05, -0.01]),
            bare_cpu_us=of([600.0]),
            worker_cpu_us=of([610.0]),
            engine_cpu_us=of([21.5]),
            memory=WaitingReport(waiting=10_000, prompt_tokens=128, traced_bytes=4096, rss_bytes=5120),
        )
    )
    for part in ("3000 tok/s", "2900 to 3100", "3.0%", "-1.0% to 5.0%", "21.5 us/token", "4.0 KiB", "5.0 KiB"):
        assert part in text


def test_columns_line_up() -> None:
    assert table(["", "median"], [["bare", "3000"], ["the engine", "7"]]).splitlines() == [
        "            median",
        "bare          3000",
        "the engine       7",
    ]


def test_a_spread_is_the_middle_and_the_ends() -> None:
    assert Spread.of([3, 1, 2, 10]) == Spread(2.5, 1, 10, 1, 10)
    assert (Spread.of(range(100)).low, Spread.of(range(100)).high) == (39, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_screen_reports_every_promise_of_the_screen_with_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["screen", "--seconds", "1", "--concurrent", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    goals = {goal["name"]: goal for goal in report["goals"]}
    assert {"first frame", "quit", "quit with a worker that hangs", "CPU of the screen, idle"} < goals.keys()
    for when in ("", ", much before", ", chat streams", ", chat streams, much before"):
        for name in ("gap of the loop, p99", "key shown, p99", "another screen shown, p99", "CPU of the screen"):
            assert goals[name + when]["value"] > 0
    assert (report["clients"], report["keys"] > 4, report["tokens_per_s"] > 0) == (2, True, True)


@pytest.mark.slow
async def test_http_reports_rates_and_added_time_of_the_api_alone(tiny: Path, tmp_path: Path) -> None:
    cores, profile = os.sched_getaffinity(0), tmp_path / "profile"
    report = await measure_http(str(tiny), 1, lambda text: None, profile=str(profile), scale=0.02)
    assert [rate.goal for rate in report.rates] == [1500, 20_000, 20_000]
    for rate in report.rates:
        assert rate.per_s.median > 0 and rate.cpu_us.median > 0
        assert rate.per_cpu_s == pytest.approx(1e6 / rate.cpu_us.median)
    assert all(0 < each.p50_ms <= each.p99_ms for each in report.late)
    assert 0 < report.chunks_per_token <= 1
    assert (report.server_core is None) == (len(cores) < 2)
    assert os.sched_getaffinity(0) == cores
    assert pstats.Stats(str(profile)).get_stats_profile().total_tt > 0
    text = http_text(report)
    for part in ("short requests, 32 clients", "streamed tokens, 128 streams", "1500/s", "20000/s", "p99"):
        assert part in text


@pytest.mark.slow
async def test_a_server_that_cannot_be_measured_says_why() -> None:
    with pytest.raises(WorkerFailed, match=r"the server ended: .*no-such-model"):
        async with ServerProcess(ServerOptions(model="no-such-model")):
            pass
