"""How the speed of a machine goes up and down: measured with its steps, and played back."""

from __future__ import annotations

from statistics import harmonic_mean

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.simulation.cluster import Cluster
from engine.simulation.demand import Mix, OpenDemand
from engine.simulation.lengths import uniform
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import DRIFT_STRETCH_S, SpeedDrift, StepCosts, StepSample, StepShape, measured_drift

pytestmark = pytest.mark.long

COSTS = StepCosts(fixed_s=0.002, decode_s=1e-4, prompt_token_s=2e-5)
CLUSTER = Cluster(costs=COSTS, max_prompts=8, kv_tokens=8192, max_model_len=1024)
SHAPE = StepShape(decodes=4, context_tokens=100)


def steps(slower: float, count: int = 200) -> list[StepSample]:
    return [StepSample(shape=SHAPE, seconds=slower * COSTS.seconds(SHAPE))] * count


def demand(rate_per_s: float) -> OpenDemand:
    return OpenDemand(Mix(prompt=uniform(32, 96), output=uniform(16, 48)), rate_per_s=rate_per_s, duration_s=20.0)


def test_a_machine_of_one_speed_has_a_course_of_ones() -> None:
    assert measured_drift(COSTS, steps(1.7)) == pytest.approx([1.0] * len(measured_drift(COSTS, steps(1.7))))


def test_a_burst_is_in_the_course_where_it_was_and_the_costs_stay_what_they_are_in_all() -> None:
    found = measured_drift(COSTS, [*steps(1.0), *steps(3.0), *steps(1.0)])
    slow = [place for place, factor in enumerate(found) if factor > 1.5]
    assert slow == list(range(slow[0], slow[-1] + 1)) and slow[0] > 0 and slow[-1] < len(found) - 1
    assert harmonic_mean(found) == pytest.approx(1.0)


def test_too_few_steps_for_a_stretch_have_no_course() -> None:
    assert measured_drift(COSTS, steps(1.0, count=3)) == ()


def test_workers_begin_elsewhere_in_the_same_course() -> None:
    factors = tuple(1 + place / 100 for place in range(50))
    assert len({SpeedDrift(factors, f"w{number}").slower(0.0) for number in range(10)}) > 5
    one = SpeedDrift(factors, "w0")
    assert one.slower(DRIFT_STRETCH_S / 2) == one.slower(0.0) != one.slower(1.5 * DRIFT_STRETCH_S)
    assert one.left_s(0.75 * DRIFT_STRETCH_S) == pytest.approx(DRIFT_STRETCH_S / 4)


def test_bursts_make_first_tokens_late_and_leave_the_throughput_as_it_is() -> None:
    bursts = measured_drift(COSTS, [*steps(1.0, 2000), *steps(4.0, 200)])
    steady, bursty = CLUSTER, msgspec.structs.replace(CLUSTER, course=bursts)
    busy = [simulate(each, demand(40.0)) for each in (steady, bursty)]
    late = [sorted((each.first_s or 0.0) - each.ask.at_s for each in outcome.served) for outcome in busy]
    assert late[1][int(0.95 * len(late[1]))] > 1.3 * late[0][int(0.95 * len(late[0]))]
    full = [simulate(each, demand(400.0)).seconds for each in (steady, bursty)]
    assert full[1] == pytest.approx(full[0], rel=0.05)


def test_a_course_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="load factor") as refused:
        msgspec.structs.replace(CLUSTER, course=(1.0, 0.0)).validate()
    assert refused.value.details["param"] == "course"
