"""What the simulator is held against: workers that take the time they were told to, and figures of both."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.backends.base import BackendRequest
from engine.config import ModelSpec, SamplingParams
from engine.errors import InvalidRequest
from engine.simulation.cluster import Cluster, FrontDoor
from engine.simulation.demand import Ask, TraceDemand
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts
from tools.performance.plan_validation import Answer, Comparison, Run, validation_text
from tools.performance.timekeeper import TimekeepingBackend

CLUSTER = Cluster(
    costs=StepCosts(fixed_s=0.01, decode_s=1e-3, prompt_token_s=1e-4),
    kv_tokens=640,
    max_model_len=256,
    max_prompts=4,
    front=FrontDoor(request_s=0.0, output_s=0.0, slot_s=0.0),
)


class Time:
    """A clock that goes on by sleeping, and by a little with every look."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.now = 5.0
        self._look_s = look_s

    def clock(self) -> float:
        self.now += self._look_s
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def loaded(time: Time) -> TimekeepingBackend:
    backend = TimekeepingBackend(CLUSTER, time.clock, time.sleep)
    backend.load(
        ModelSpec(path=Path("none"), name="none"),
        max_prompts=4,
        step_tokens=512,
        page_tokens=16,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def request(number: int, prompt: int = 40) -> BackendRequest:
    params = SamplingParams(max_tokens=8, seed=0)
    return BackendRequest(id=str(number), prompt_ids=[number + 1] * prompt, params=params)


def run(backend: TimekeepingBackend, requests: int, tokens: int) -> int:
    """Work until each has its tokens; how many came."""
    for number in range(requests):
        backend.submit(request(number))
    left, came = dict.fromkeys(map(str, range(requests)), tokens), 0
    while backend.has_work():
        for event in backend.step():
            assert event.token_id is not None
            came += 1
            left[event.request_id] -= 1
            if not left[event.request_id]:
                backend.cancel(event.request_id)
    return came


@pytest.mark.parametrize("look_s", [0.0, 1e-4])
def test_steps_take_their_time_however_long_what_is_between_them_takes(look_s: float) -> None:
    time = Time(look_s)
    backend = loaded(time)
    began_s = time.now
    assert run(backend, 3, 8) == 24
    backend.check()
    asks = [Ask(at_s=0.0, prompt_tokens=40, output_tokens=8) for _ in range(3)]
    expected_s = simulate(CLUSTER, TraceDemand(asks)).seconds
    assert time.now - began_s == pytest.approx(expected_s, rel=0.05)


def test_a_prompt_is_found_again_within_its_scope() -> None:
    backend = loaded(Time())
    found = []
    for number, scope in enumerate(("alice", "bob", "alice")):
        backend.submit(msgspec.structs.replace(request(0), id=str(number), cache_scope=scope))
        found += [event.cached_tokens for event in backend.step() if event.cached_tokens is not None]
    assert found == [0, 0, 32]


def test_idle_time_is_not_made_up_for() -> None:
    time = Time()
    backend = loaded(time)
    run(backend, 1, 2)
    time.now += 30
    began_s = time.now
    run(backend, 1, 1)
    assert time.now - began_s >= CLUSTER.costs.fixed_s


def test_what_it_cannot_do_is_refused() -> None:
    backend = loaded(Time())
    with pytest.raises(InvalidRequest, match="only keeps time"):
        backend.submit(BackendRequest(id="1", prompt_ids=[1], params=SamplingParams(max_tokens=0), embed=True))


def run_of(last_s: float, slowness: float = 1.0) -> Run:
    """Whose simulated second answer ends at `last_s` instead of after 2 s."""
    real = [Answer(0.0, 0.1, 1.1, 11), Answer(1.0, 1.3, 2.0, 11)]
    simulated = [Answer(0.0, 0.1, 1.1, 11), Answer(1.0, 1.3, last_s, 11)]
    return Run(
        load="light",
        rate_per_s=1.0,
        fit_error=0.0,
        slowness=slowness,
        real=real,
        simulated=simulated,
        at_speed=real,
    )


def test_figures_are_medians_of_the_runs_of_a_load() -> None:
    found = Comparison.of("light", [run_of(2.2, 1.25), run_of(2.2, 1.25), run_of(11.0)])
    assert (found.runs, found.requests) == (3, 6)
    assert found.real.output_tokens_per_s == pytest.approx(11)
    assert found.simulated.output_tokens_per_s == pytest.approx(10)
    assert found.real.ttft_p95_s == pytest.approx(0.3)
    text = validation_text([found])
    assert "6 requests in 3 runs" in text and "+25%" in text


def test_how_far_off_it_is_is_the_median_of_the_runs_with_their_range() -> None:
    found = Comparison.of("light", [run_of(2.2), run_of(2.0), run_of(11.0)])
    off = found.off["output_tokens_per_s"]
    assert (off.least, off.median, off.most) == pytest.approx((2 / 11 - 1, 10 / 11 - 1, 0.0))
    assert "-9.1% (-82% to +0%)" in validation_text([found])
