"""`ericllm plan`: answers from a file of costs, and one sentence for what cannot be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from console.cli.main import main
from console.cli.plan import parse, questions
from engine.cluster.wire import SILENCE_S
from engine.errors import InvalidRequest
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.demand import Ask, ClosedDemand, Mix, OpenDemand
from engine.simulation.lengths import uniform
from engine.simulation.outcome import Outcome, Served, Window
from engine.simulation.step_costs import MeasuredModel, StepCosts, StepFit
from engine.simulation.what_if import (
    Case,
    Goal,
    RunCases,
    front_door_limit,
    near_full_window,
    node_death,
    workers_needed,
)

pytestmark = pytest.mark.long

COSTS = StepCosts(fixed_s=16e-3, decode_s=1e-3, context_token_s=1e-7, prompt_token_s=1e-4)
MIX = Mix(prompt=uniform(50, 150), output=uniform(20, 60))
GOAL = Goal(slo=Slo(ttft_s=0.3, itl_s=0.1), window=Window(since_s=2.0, until_s=8.0))
CLUSTER = Cluster(costs=COSTS, max_prompts=8, kv_tokens=8192, workers_per_node=2)


def demand(strength: float) -> OpenDemand:
    return OpenDemand(MIX, rate_per_s=30 * strength, duration_s=8, seed=1)


def longer(strength: float) -> OpenDemand:
    return OpenDemand(MIX, rate_per_s=30 * strength, duration_s=20, seed=1)


def quiet(text: str) -> None:
    assert text


@pytest.fixture
def costs(tmp_path: Path) -> str:
    fit = StepFit(costs=COSTS, samples=99, outliers=1, error_median=0.02, error_p95=0.1, bias=0.0, explained=0.99)
    measured = MeasuredModel(
        model="a model",
        device="cuda:0",
        machine="a machine",
        threads=1,
        max_model_len=4096,
        kv_tokens=16_384,
        page_tokens=16,
        step_tokens=512,
        fit=fit,
        max_prompts=16,
        context_tokens=1536,
        backend="torch",
        dtype="bfloat16",
        weights="int8",
        cache_bits=8,
    )
    measured.write(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_the_answer_is_the_fewest_workers_that_meet_the_goal() -> None:
    answer = workers_needed(CLUSTER, demand, GOAL, most=64, margin=True, show=quiet)
    assert answer.workers is not None and answer.margin is not None
    met = {trial.workers: GOAL.is_met(trial.summary) for trial in answer.trials if trial.demand == 1}
    assert met[answer.workers] and not met[answer.workers - 1]
    assert all(met[workers] == (workers >= answer.workers) for workers in met)
    stronger = [trial for trial in answer.trials if trial.demand > 1]
    assert all(GOAL.is_met(trial.summary) == (trial.demand <= 1 + answer.margin) for trial in stronger)


def served_by(needed: int, sizes: list[int]) -> RunCases:
    """Simulates a cluster that answers as many requests as it has of the `needed` workers; `sizes` are those tried."""

    def run(cases: Sequence[Case]) -> Sequence[Outcome]:
        outcomes = []
        for cluster, _, window in cases:
            sizes.append(cluster.workers)
            asks = [Ask(at_s=2 + number / 100, prompt_tokens=9, output_tokens=9) for number in range(600)]
            outcomes.append(
                Outcome(
                    [
                        Served(ask, "answered", 0.0, 0.0, ask.at_s, ask.at_s, ask.at_s, 9)
                        if number % needed < cluster.workers
                        else Served(ask, "refused", ended_s=ask.at_s)
                        for number, ask in enumerate(asks)
                    ],
                    window=window,
                    seconds=8.0,
                )
            )
        return outcomes

    return run


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 12, 40, 97, 200])
@pytest.mark.parametrize("strength", [0.2, 0.8, 1.0, 1.3, 4.0])
def test_the_search_ends_at_the_fewest_workers_however_far_off_its_estimate_is(needed: int, strength: float) -> None:
    sizes: list[int] = []
    whole = msgspec.structs.replace(GOAL, share=0.999, slo=Slo())
    answer = workers_needed(
        CLUSTER,
        lambda times: OpenDemand(MIX, rate_per_s=100 * strength, duration_s=8),
        whole,
        most=1024,
        margin=False,
        show=quiet,
        run=served_by(needed, sizes),
    )
    assert answer.workers == needed
    assert len(sizes) == len(set(sizes)) <= (9 if strength == 1.0 else 30)


def test_too_few_workers_to_try_is_told_as_such() -> None:
    answer = workers_needed(CLUSTER, demand, GOAL, most=1, margin=True, show=quiet)
    assert (answer.workers, answer.margin, answer.why) == (None, None, "most")


def test_the_search_ends_where_requests_miss_the_goal_even_alone() -> None:
    hurried = msgspec.structs.replace(GOAL, slo=Slo(ttft_s=0.01))
    answer = workers_needed(CLUSTER, demand, hurried, most=1024, show=quiet)
    assert (answer.workers, answer.why, answer.trials) == (None, "requests", ())
    assert set(answer.alone.misses) == {"first token"}
    small = msgspec.structs.replace(CLUSTER, max_model_len=64)
    assert set(workers_needed(small, demand, GOAL, most=1024, show=quiet).alone.misses) == {"too long"}


def test_the_search_ends_where_the_front_door_is_full() -> None:
    slow = msgspec.structs.replace(CLUSTER, front=FrontDoor(request_s=0.1))
    answer = workers_needed(slow, demand, GOAL, most=1024, show=quiet)
    assert (answer.workers, answer.why) == (None, "front")
    assert max(trial.workers for trial in answer.trials) < 64


def test_requests_with_a_common_prefix_are_alone_with_it_in_the_cache() -> None:
    mix = Mix(prompt=uniform(50, 60), output=uniform(20, 60), shared=1.0, groups=400, shared_tokens=3000)
    shared = OpenDemand(mix, rate_per_s=30, duration_s=8)
    answer = workers_needed(CLUSTER, lambda strength: shared, GOAL, most=1, show=quiet)
    assert answer.alone.kept_share == 1 and answer.why == "most"


def test_a_simulation_in_which_nothing_counts_answers_nothing() -> None:
    late = msgspec.structs.replace(GOAL, window=Window(since_s=20.0, until_s=30.0))
    with pytest.raises(InvalidRequest, match="no request comes between 20 and 30 s"):
        workers_needed(CLUSTER, demand, late, most=4, show=quiet)
    with pytest.raises(InvalidRequest, match="no request comes between 20 and 30 s"):
        node_death(msgspec.structs.replace(CLUSTER, workers=2), demand, late, Death(at_s=4.0), quiet)


def test_a_death_is_compared_with_the_same_hour_without_it() -> None:
    cluster = Cluster(costs=COSTS, workers=5, workers_per_node=2, max_prompts=8, kv_tokens=8192)
    answer = node_death(cluster, longer, GOAL, Death(at_s=4.0, restart_s=2.0, detected_s=0.5), quiet)
    assert (answer.workers, answer.lost_workers, answer.not_answered) == (5, 2, 0)
    assert answer.resumed > 0 and answer.late > 0
    assert answer.worst_ttft_s > answer.calm.ttft_s.most
    assert answer.recovered_s is not None and 0 < answer.recovered_s < 8
    assert (answer.back_s, answer.last_s) == (6.5, pytest.approx(20, abs=0.2))


def test_requests_that_are_late_to_the_end_are_told_as_such() -> None:
    cluster = Cluster(costs=COSTS, workers=4, workers_per_node=2, max_prompts=8, kv_tokens=8192)
    answer = node_death(cluster, longer, GOAL, Death(at_s=4.0, restart_s=60.0), quiet)
    assert answer.recovered_s is None and answer.late > 10


def test_users_who_are_late_in_the_calm_too_are_not_counted_against_the_death() -> None:
    def users(strength: float) -> ClosedDemand:
        return ClosedDemand(MIX, users=40, think_s=0.2, duration_s=8, seed=2)

    crowded = Cluster(costs=COSTS, workers=2, max_prompts=8, kv_tokens=8192)
    hopeless = msgspec.structs.replace(GOAL, slo=Slo(ttft_s=0.01))
    answer = node_death(crowded, users, hopeless, Death(at_s=4.0, detected_s=0.2, restart_s=1.0), quiet)
    assert answer.calm.kept_share < 0.05
    assert answer.late == 0 and answer.recovered_s == 0


def test_the_front_door_is_full_where_the_answer_says() -> None:
    slow = Cluster(costs=COSTS, workers=3, max_prompts=8, kv_tokens=8192, front=FrontDoor(request_s=12e-3, slot_s=1e-5))
    answer = front_door_limit(slow, demand, GOAL, quiet)
    below, above = answer.trials
    assert below.summary.front_busy == pytest.approx(0.9, abs=0.1)
    assert above.summary.front_busy == pytest.approx(1.0, abs=0.02)
    assert above.summary.front_behind_s > 5 * below.summary.front_behind_s


def test_a_front_door_close_to_full_counts_as_many_requests_as_it_does_today() -> None:
    def until_s(times: float) -> float:
        return near_full_window(Window(since_s=30.0, until_s=120.0), 90.0, times).until_s

    assert [until_s(times) for times in (0.5, 1.0, 3.0, 90.0)] == [120.0, 120.0, 60.0, 40.0]


def test_users_that_come_within_a_ramp_are_all_there_after_it() -> None:
    users = ClosedDemand(MIX, users=50, think_s=1.0, duration_s=10, ramp_s=4.0)
    starts = [ask.at_s for ask in users.first()]
    assert len(starts) == 50 and starts == sorted(starts) and 3 < starts[-1] <= 4


def test_the_command_answers_three_questions(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--users", "40", "--think", "1", "--slo-ttft", "400ms", "--slo_itl=60ms", "--duration", "16"]
    assert main(["plan", "--costs", costs, *flags, "--output", "40", "--prompt", "100", "--front-request", "20ms"]) == 0
    said, progress = capsys.readouterr()
    assert progress.startswith("simulating, which takes about ")
    for sentence in (
        "Needs ",
        "A node with 1 of ",
        "The front end is full at ",
        "TTFT 400 ms and ITL 60 ms",
        "(cuda:0, torch, bfloat16, int8 weights, 8-bit KV cache)",
        "Worker: max prompts 16, 512 tokens per step, KV cache 16384 tokens, context 4096. Queue: 1024.",
    ):
        assert sentence in said
    assert "Note:" not in said


def test_what_was_not_measured_is_told(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "3", "--duration", "10", "--prompt", "1600", "--max-prompts", "64", "--step-tokens", "1024"]
    assert main(["plan", "--costs", costs, *flags, "--ask", "cards"]) == 0
    said = capsys.readouterr().out
    for note in (
        "measured up to 16 concurrent answers; up to 64 are extrapolated",
        "measured steps of up to 512 tokens",
        "measured contexts of up to 1536 tokens; 100% of requests",
        "requests were counted, so shares are imprecise",
    ):
        assert note in said


def test_costs_from_before_their_configuration_was_kept_are_read(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(Path(costs).read_text())
    for name in ("max_prompts", "context_tokens", "backend", "dtype", "weights", "cache_bits"):
        del kept[name]
    (tmp_path / "old.json").write_text(json.dumps(kept))
    assert (
        main(["plan", "--costs", str(tmp_path / "old.json"), "--rate", "20", "--duration", "20", "--ask", "cards"]) == 0
    )
    said = capsys.readouterr().out
    assert "has no measured concurrency" in said and "Worker: max prompts 16," in said


def test_the_death_question_goes_on_until_well_after_the_restart(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rate", "20", "--duration", "10", "--output", "20", "--workers", "2", "--ask", "death"]
    assert main(["plan", "--costs", costs, *flags, "--detect", "1", "--restart", "9", "--slo-ttft", "1", "--json"]) == 0
    death = json.loads(capsys.readouterr().out)["death"]
    assert (death["at_s"], death["back_s"]) == (5, 15)
    assert death["last_s"] == pytest.approx(20, abs=0.5)


def test_a_death_is_known_when_a_connection_is_given_up(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "20", "--duration", "10", "--output", "20", "--workers", "2", "--ask", "death", "--restart", "1"]
    assert main(["plan", "--costs", costs, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["death"]["back_s"] == 5 + SILENCE_S + 1


def test_a_goal_that_cannot_be_met_says_why(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", costs, "--rate", "5", "--prompt", "5000"]) == 0
    said = capsys.readouterr().out
    assert "requests miss it even one by one" in said
    assert "have a prompt longer than 4095 tokens, the limit of the context" in said
    slow = ["--front-request", "20ms", "--slo-ttft", "1"]
    assert main(["plan", "--costs", costs, "--rate", "200", "--duration", "120", *slow]) == 0
    said = capsys.readouterr().out
    assert "the front end is full" in said and "wait longer than 1000 ms for the first token" in said


def test_workers_that_are_too_few_say_what_becomes_of_requests(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "60", "--duration", "20", "--workers", "1", "--max-queue", "5", "--timeout", "3"]
    assert main(["plan", "--costs", costs, *flags, "--ask", "death"]) == 0
    said = capsys.readouterr().out
    assert "The goal is not met even without the failure." in said
    assert "find the queue full (--max-queue 5)" in said and "not finished within --timeout 3 s" in said


def test_json_has_what_was_asked_and_nothing_else(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "20", "--duration", "5", "--output", "20", "--workers", "2", "--ask", "death", "--json"]
    assert main(["plan", "--costs", costs, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["death"]["workers"] == 2
    assert report["workers"] is None and report["front"] is None


def test_a_trace_is_served_as_it_came(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "".join(f"{900 + at},50,10\n" for at in range(200)))
    assert main(["plan", "--costs", costs, "--trace", str(trace), "--ask", "cards", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [trial["summary"]["requests"] for trial in report["workers"]["trials"]] == [200]
    assert main(["plan", "--costs", costs, "--trace", str(trace), "--duration", "2m"]) == 0
    said = capsys.readouterr().out
    assert "Needs 1 worker (1 card)." in said
    assert "120 of 200 requests (--duration leaves out the rest, until 199 s)" in said
    assert "The last request arrives at 119 s; later effects are not simulated." in said


def test_a_trace_shorter_than_the_warm_up_of_other_demands_counts(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "1732000000,50,400\n" * 100)
    assert main(["plan", "--costs", costs, "--trace", str(trace), "--ask", "cards", "--slo-ttft", "300ms"]) == 0
    assert "Needs 1 worker" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--users", "3", "--rate", "2"], "only one of --users"),
        (["--prompt", "long"], "prompt: long is not a length"),
        (["--shared", "2"], "max 1"),
        (["--share", "3"], "share is 3"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv could not be read"),
        (["--slo-ttft", "0"], "slo_ttft is 0"),
        (["--kv-tokens", "3"], "kv_tokens is 3"),
        (["--duration", "0"], "--duration is 0 s"),
        (["--rate", "0.001"], "none arrives between 30 and 120 s"),
        (["--users", "1", "--think", "100h"], "no request comes between 30 and 120 s"),
        (["a model"], "MODEL has no effect: "),
        (["--threads", "2"], "--threads has no effect: "),
        (["--dtype", "float32"], "--dtype has no effect: "),
        (["--trace", "day.csv", "--prompt", "9"], "--prompt has no effect: --trace has"),
        (["--trace", "day.csv", "--seed", "9"], "--seed has no effect: --trace has"),
        (["--trace", "day.csv", "--think", "9"], "--think has no effect: --trace has"),
        (["--trace", "day.csv", "--ask", "front"], "--ask front needs --users"),
        (["--rate", "9", "--think", "9"], "--think has no effect: --rate"),
        (["--users", "9", "--burstiness", "2"], "--burstiness has no effect: it needs --rate"),
        (["--shared-tokens", "9"], "--shared-tokens has no effect: it needs --shared"),
        (["--workers", "9", "--ask", "cards"], "--workers and --ask cards exclude each other: one sets the workers"),
        (["--workers", "9", "--most-workers", "10"], "--most-workers has no effect"),
        (["--ask", "cards", "--restart", "2m"], "--restart has no effect: it needs --ask death"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    costs: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--costs", costs, *flags]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()
    assert said in complaint[-1]


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ([], ("cards", "death", "front")),
        (["--workers", "3"], ("death", "front")),
        (["--trace", "day.csv"], ("cards", "death")),
        (["--workers", "3", "--trace", "day.csv"], ("death",)),
        (["--ask", "front"], ("front",)),
    ],
)
def test_what_can_be_answered_is_where_nothing_is_asked(flags: list[str], asked: tuple[str, ...]) -> None:
    assert tuple(questions(parse(flags, argparse.ArgumentParser()))) == asked


def test_a_default_that_is_given_all_the_same_is_given() -> None:
    given = parse(["--detect", "10", "demo"], argparse.ArgumentParser())
    assert given.named == {"detect", "model"}
    assert (given.detect, given.share, given.ask) == (10, 0.95, None)


@pytest.mark.parametrize("flags", [["--users", "0"], ["--rate", "-1"], ["--slo-itl", "5m"], ["--ask", "why"]])
def test_a_wrong_flag_ends_the_program_with_a_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *flags])
    assert ended.value.code == 2
    assert "ericllm plan --help" in capsys.readouterr().err


def test_the_costs_of_the_documented_sample_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path(__file__).parents[2] / "docs/planning-7b.json"
    assert (
        main(["plan", "--costs", str(kept), "--users", "20", "--think", "1", "--duration", "8", "--ask", "cards"]) == 0
    )
    assert "a 7B model, measured on no card (made up, torch, bfloat16, 16-bit KV cache)" in capsys.readouterr().out
