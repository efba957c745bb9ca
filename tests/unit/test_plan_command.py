"""`ericllm plan`: answers from a file of costs, and one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console.cli import main
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.demand import ClosedDemand, Mix, OpenDemand
from engine.simulation.lengths import uniform
from engine.simulation.outcome import Slo, Window
from engine.simulation.questions import Goal, front_door_limit, node_death, workers_needed
from engine.simulation.step_costs import MeasuredModel, StepCosts, StepFit

COSTS = StepCosts(fixed_s=16e-3, decode_s=1e-3, context_token_s=1e-7, prompt_token_s=1e-4)
MIX = Mix(prompt=uniform(50, 150), output=uniform(20, 60))
GOAL = Goal(slo=Slo(ttft_s=0.3, itl_s=0.1), window=Window(since_s=2.0, until_s=8.0))
CLUSTER = Cluster(costs=COSTS, max_prompts=8, kv_tokens=8192, workers_per_node=2)


def demand(strength: float) -> OpenDemand:
    return OpenDemand(MIX, rate_per_s=30 * strength, duration_s=8, seed=1)


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
    )
    measured.write(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_the_answer_is_the_fewest_workers_that_meet_the_goal() -> None:
    answer = workers_needed(CLUSTER, demand, GOAL, most=64, margin=True, show=quiet)
    assert answer.workers is not None and answer.margin is not None
    met = {trial.workers: GOAL.met(trial.summary) for trial in answer.trials if trial.demand == 1}
    assert met[answer.workers] and not met[answer.workers - 1]
    assert all(met[workers] == (workers >= answer.workers) for workers in met)
    stronger = [trial for trial in answer.trials if trial.demand > 1]
    assert all(GOAL.met(trial.summary) == (trial.demand <= 1 + answer.margin) for trial in stronger)


def test_too_few_workers_to_try_is_told_as_such() -> None:
    answer = workers_needed(CLUSTER, demand, GOAL, most=1, margin=True, show=quiet)
    assert answer.workers is None and answer.margin is None


def test_a_death_is_compared_with_the_same_hour_without_it() -> None:
    cluster = Cluster(costs=COSTS, workers=4, workers_per_node=2, max_prompts=8, kv_tokens=8192)
    answer = node_death(cluster, demand, GOAL, Death(at_s=4.0, restart_s=2.0, detected_s=0.5), quiet)
    assert (answer.workers, answer.lost_workers, answer.not_answered) == (4, 2, 0)
    assert answer.resumed > 0 and answer.late > 0
    assert answer.worst_ttft_s > answer.calm.ttft_s.most
    assert 0 < answer.recovered_s < 8


def test_the_front_door_is_full_where_the_answer_says() -> None:
    slow = Cluster(costs=COSTS, workers=3, max_prompts=8, kv_tokens=8192, front=FrontDoor(request_s=12e-3, slot_s=1e-5))
    answer = front_door_limit(slow, demand, GOAL, quiet)
    below, nearly, almost, above = answer.trials
    assert below.summary.front_busy == pytest.approx(0.5, abs=0.1)
    assert nearly.summary.front_busy < almost.summary.front_busy
    assert above.summary.front_busy == pytest.approx(1.0, abs=0.02)
    assert above.summary.front_behind_s > 5 * below.summary.front_behind_s


def test_users_that_come_within_a_ramp_are_all_there_after_it() -> None:
    users = ClosedDemand(MIX, users=50, think_s=1.0, duration_s=10, ramp_s=4.0)
    starts = [ask.at_s for ask in users.first()]
    assert len(starts) == 50 and starts == sorted(starts) and 3 < starts[-1] <= 4


def test_the_command_answers_three_questions(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--users", "40", "--think", "1", "--slo-ttft", "400ms", "--slo_itl=60ms", "--duration", "8"]
    assert main(["plan", "--costs", costs, *flags, "--output", "40", "--prompt", "100", "--front-request", "20ms"]) == 0
    said = capsys.readouterr().out
    for sentence in ("It takes ", "A node with 1 of ", "The front door is full at ", "TTFT 400 ms and ITL 60 ms"):
        assert sentence in said


def test_json_has_what_was_asked_and_nothing_else(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "20", "--duration", "5", "--output", "20", "--workers", "2", "--ask", "death", "--json"]
    assert main(["plan", "--costs", costs, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["death"]["workers"] == 2
    assert report["workers"] is None and report["front"] is None


def test_a_trace_is_served_as_it_came(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 10},50,10\n" for at in range(50)))
    assert main(["plan", "--costs", costs, "--trace", str(trace), "--duration", "8", "--ask", "cards"]) == 0
    assert "It takes 1 worker (1 card)." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--users", "3", "--rate", "2"], "three ways to say who asks"),
        (["--prompt", "long"], "prompt: long is no length"),
        (["--shared", "2"], "it is a share"),
        (["--share", "3"], "share is 3"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv could not be read"),
        (["--slo-ttft", "0"], "slo_ttft is 0"),
        (["--kv-tokens", "3"], "kv_tokens is 3"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    costs: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--costs", costs, *flags]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()
    assert said in complaint[-1]


@pytest.mark.parametrize("flags", [["--users", "0"], ["--rate", "-1"], ["--slo-itl", "soon"], ["--ask", "why"]])
def test_a_wrong_flag_ends_the_program_with_a_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *flags])
    assert ended.value.code == 2
    assert "ericllm plan --help" in capsys.readouterr().err
