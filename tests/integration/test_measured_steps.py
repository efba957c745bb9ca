"""Steps of the real backend, measured in a process of their own, and costs fitted to them."""

from __future__ import annotations

import pytest

from console.planning.measuring import WITHOUT_GUESSES, Design, MeasuredWorker, local_model, measure
from engine.errors import EngineError
from engine.simulation.step_costs import fit_steps

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


async def test_costs_say_of_which_configuration_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERICLLM_NGRAM_DRAFT", "true")
    measured = await measure(
        "demo",
        threads=1,
        max_prompts=2,
        step_tokens=128,
        changes={"dtype": "float32", "max_model_len": "512", "cache_bits": "8"},
        seconds=0.0,
        show=lambda said: None,
    )
    assert (measured.backend, measured.dtype, measured.weights, measured.cache_bits) == ("torch", "float32", "auto", 8)
    assert (measured.max_prompts, measured.step_tokens, measured.threads, measured.max_model_len) == (1, 128, 1, 512)
    assert 96 <= measured.context_tokens < 512
    assert measured.kv_tokens == 2 * 512


def test_saved_settings_that_guess_tokens_are_left_out_of_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERICLLM_NGRAM_DRAFT", "true")
    assert local_model("demo", threads=1).spec.ngram_draft
    assert not local_model("demo", threads=1, changes=WITHOUT_GUESSES).spec.ngram_draft


async def test_a_model_that_is_not_there_is_told_in_a_sentence() -> None:
    with pytest.raises(EngineError, match="no-such-model"):
        async with MeasuredWorker("no-such-model", DESIGN, 1):
            pass
