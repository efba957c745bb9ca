"""What the loop beside the steps costs, found by probes."""

from __future__ import annotations

import msgspec
import pytest

from engine.simulation.cluster import Cluster, FrontDoor
from engine.simulation.demand import Mix, OpenDemand
from engine.simulation.lengths import uniform
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts
from tools.performance.plan_validation import Figures, calibrated, probe_simulated, simulated_answers

pytestmark = pytest.mark.long

CLUSTER = Cluster(
    costs=StepCosts(fixed_s=0.002, decode_s=1e-4, prompt_token_s=2e-5),
    kv_tokens=16_384,
    max_model_len=2048,
    front=FrontDoor(request_s=250e-6, output_s=0.0, slot_s=5e-6, shared=1.0),
)


def as_it_is(hop_s: float, message_s: float, output_s: float) -> Cluster:
    front = msgspec.structs.replace(CLUSTER.front, message_s=message_s, output_s=output_s)
    return msgspec.structs.replace(CLUSTER, hop_s=hop_s, front=front)


@pytest.mark.parametrize("costs", [(0.0, 0.0, 0.0), (1e-3, 3e-4, 1e-5), (5e-4, 1e-4, 4e-5)])
def test_what_the_loop_beside_the_steps_costs_is_found_so_that_probes_are_told(
    costs: tuple[float, float, float],
) -> None:
    real = probe_simulated(as_it_is(*costs))
    found = probe_simulated(calibrated(CLUSTER, [real]))
    assert found.values == pytest.approx(real.values, rel=0.1)


@pytest.mark.parametrize("costs", [(1e-3, 3e-4, 1e-5), (5e-4, 1e-4, 4e-5)])
def test_what_was_found_tells_another_load(costs: tuple[float, float, float]) -> None:
    real = as_it_is(*costs)
    found = calibrated(CLUSTER, [probe_simulated(real)])
    demand = OpenDemand(Mix(prompt=uniform(32, 160), output=uniform(16, 64)), rate_per_s=60.0, duration_s=10.0)
    figures = [Figures.of(simulated_answers(simulate(each, demand))) for each in (real, found)]
    assert figures[1].ttft_p50_s == pytest.approx(figures[0].ttft_p50_s, rel=0.1)
    assert figures[1].ttft_p95_s == pytest.approx(figures[0].ttft_p95_s, rel=0.1)


def test_probes_that_are_faster_than_steps_alone_cost_nothing() -> None:
    faster = msgspec.structs.replace(CLUSTER, costs=CLUSTER.costs.slower(0.8))
    found = calibrated(CLUSTER, [probe_simulated(faster)])
    assert (found.front.message_s, found.front.output_s) == (0.0, 0.0)


def test_of_several_probes_the_middle_counts() -> None:
    calm, held_up = probe_simulated(as_it_is(0.0, 1e-4, 1e-5)), probe_simulated(as_it_is(0.0, 5e-3, 1e-3))
    assert calibrated(CLUSTER, [calm, held_up, calm]) == calibrated(CLUSTER, [calm])
