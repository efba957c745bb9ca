"""Steps of the real backend, measured in a process of their own, and costs fitted to them."""

from __future__ import annotations

import pytest

from console.planning.measuring import MeasuredWorker
from console.planning.steps import Design
from engine.errors import EngineError
from engine.simulation.fit import fit_steps

DESIGN = Design(max_prompts=4, step_tokens=128, page_tokens=16, longest_tokens=400)


@pytest.mark.slow
async def test_a_worker_measures_the_design_and_costs_fit_its_steps() -> None:
    async with MeasuredWorker("demo", DESIGN, 1) as worker:
        samples = await worker.steps(60)
        again = await worker.steps(0)
    assert worker.loaded.max_model_len == 2048
    assert {sample.shape.decodes for sample in samples} >= {0, 1, 2, 4}
    assert all(sample.shape.decodes + sample.shape.prompt_tokens <= DESIGN.step_tokens for sample in samples)
    assert all(sample.seconds > 0 for sample in samples)
    fit = fit_steps(samples)
    assert fit.costs.validate().seconds(samples[0].shape) > 0
    assert again and len(again) < len(samples)


async def test_a_model_that_is_not_there_is_told_in_a_sentence() -> None:
    with pytest.raises(EngineError, match="no-such-model"):
        async with MeasuredWorker("no-such-model", DESIGN, 1):
            pass
