"""From measured steps to step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.simulation.least_squares import solve_robustly
from engine.simulation.speed_drift import measured_course
from engine.simulation.step_costs import StepCosts, StepFit, StepSample

LEAST_SAMPLES = 16
_DISTRUSTED = 0.1


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """The prices that tell these steps best. Raises InvalidRequest where there are too few, or one took no time."""
    if len(samples) < LEAST_SAMPLES:
        raise InvalidRequest(
            f"{len(samples)} measured steps are too few to fit costs; {LEAST_SAMPLES} at least are needed"
        )
    for sample in samples:
        if not 0 < sample.seconds < float("inf"):
            raise InvalidRequest(f"a measured step says that it took {sample.seconds} seconds")
    targets = [sample.seconds for sample in samples]
    prices, trust = solve_robustly([sample.shape.features for sample in samples], targets)
    costs = StepCosts(**dict(zip(StepCosts.__struct_fields__, prices, strict=True)))
    return _judged(costs, samples, trust)


def _judged(costs: StepCosts, samples: Sequence[StepSample], trust: Sequence[float]) -> StepFit:
    kept = [sample for sample, share in zip(samples, trust, strict=True) if share >= _DISTRUSTED]
    told = [costs.seconds(sample.shape) for sample in kept]
    took = [sample.seconds for sample in kept]
    errors = sorted(abs(one / other - 1) for one, other in zip(told, took, strict=True))
    mean_s = statistics.fmean(took)
    missed = sum((one - other) ** 2 for one, other in zip(told, took, strict=True))
    spread = sum((other - mean_s) ** 2 for other in took)
    return StepFit(
        costs=costs,
        samples=len(samples),
        outliers=len(samples) - len(kept),
        error_median=statistics.median(errors),
        error_p95=errors[int(0.95 * (len(errors) - 1))],
        bias=sum(took) / sum(told) - 1,
        explained=1 - missed / spread if spread else 1.0,
        course=measured_course(costs, samples),
    )
