"""What a model was used for, as vLLM's metrics count it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.backends.base import BackendStats, DraftPosition, FinishReason
from engine.metrics.distributions import HistogramCounter
from engine.metrics.meter import (
    CHOICES,
    DECODE_TIME,
    E2E,
    INFERENCE_TIME,
    ITL,
    MAX_OUTPUT,
    OUTPUT_TOKENS,
    STEP_TOKENS,
    TTFT,
    Choices,
    FinishedRequest,
    Meter,
    ModelUsage,
)


def new_meter() -> Meter:
    meter = Meter()
    meter.add_model("m")
    return meter


def usage_of(meter: Meter) -> ModelUsage:
    """The numbers of the one model."""
    (usage,) = meter.usage()
    return usage


def finish(meter: Meter, reason: FinishReason = "stop", output_tokens: int = 3, **fields: object) -> None:
    request = FinishedRequest(reason=reason, prompt_tokens=10, output_tokens=output_tokens, **fields)  # type: ignore[arg-type]
    meter.count_finish(1.0, "m", request)


def step(
    meter: Meter,
    steps: int,
    output_tokens: int,
    stats: BackendStats,
    before: BackendStats,
    gaps: Mapping[float, int] | None = None,
) -> None:
    """A report of some steps of a worker."""
    meter.count_steps(
        1.0,
        "m",
        "w0",
        steps=steps,
        step_s=0.01,
        ended_at=1.0,
        sequences=1,
        output_tokens=output_tokens,
        gaps=gaps or {},
        stats=stats,
        before=before,
    )


def test_a_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    histogram = HistogramCounter((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    frozen = histogram.freeze()
    assert frozen.counts == (2, 3, 3)
    assert (frozen.count, frozen.sum) == (4, 12.0)


def test_an_observation_can_count_several_times() -> None:
    histogram = HistogramCounter((1.0,))
    histogram.observe(0.5, times=3)
    assert (histogram.freeze().count, histogram.freeze().sum) == (3, 1.5)


def test_every_gap_between_tokens_is_counted() -> None:
    meter = new_meter()
    step(meter, 1, 3, BackendStats(), BackendStats(), {0.1: 3})
    histogram = usage_of(meter).histograms[ITL]
    assert histogram.count == 3
    assert histogram.sum == pytest.approx(0.3)


def test_a_request_without_an_answer_counts_into_no_lengths_of_answers() -> None:
    meter = new_meter()
    meter.count_prefill(1.0, "m", 10, 0, None)
    finish(meter, output_tokens=0, e2e_s=2.0, longest=0)
    usage = usage_of(meter)
    assert (usage.prompt_tokens, usage.histograms[E2E].count) == (10, 1)
    assert [usage.histograms[name].count for name in (OUTPUT_TOKENS, MAX_OUTPUT, TTFT)] == [0, 0, 0]


def test_only_whole_answers_count_into_latencies() -> None:
    meter = new_meter()
    finish(meter, e2e_s=2.0, prefill_s=0.5, decode_s=1.25)
    finish(meter, "cancelled", 1, e2e_s=0.1)
    finish(meter, "error", 0, e2e_s=0.1)
    usage = usage_of(meter)
    assert (usage.histograms[E2E].count, usage.histograms[OUTPUT_TOKENS].sum) == (1, 3)
    assert (usage.histograms[INFERENCE_TIME].sum, usage.histograms[DECODE_TIME].sum) == (1.75, 1.25)
    assert usage.finished == {"stop": 1, "cancelled": 1, "error": 1}


def test_lengths_are_told_up_to_the_longest_context_as_vllm_does() -> None:
    meter = new_meter()
    meter.add_model("m", 100)
    finish(meter, output_tokens=400)
    lengths = usage_of(meter).histograms[OUTPUT_TOKENS]
    assert lengths.bounds == (1, 2, 5, 10, 20, 50, 100)
    assert (lengths.counts[-1], lengths.count) == (0, 1)


def test_a_step_counts_the_tokens_of_prompts_and_answers() -> None:
    meter = new_meter()
    step(meter, 1, 4, BackendStats(prompt_tokens_computed=96), BackendStats())
    step(meter, 0, 0, BackendStats(prompt_tokens_computed=96), BackendStats(prompt_tokens_computed=96))
    step(meter, 2, 8, BackendStats(prompt_tokens_computed=96), BackendStats(prompt_tokens_computed=96))
    steps = usage_of(meter).histograms[STEP_TOKENS]
    assert (steps.count, steps.sum) == (3, 108)
    assert steps.bounds == (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert dict(zip(steps.bounds, steps.counts, strict=True))[8.0] == 2


def test_guesses_are_counted_by_position_and_survive_a_backend_that_counts_anew() -> None:
    meter = new_meter()
    grown = BackendStats(
        draft_tokens=6,
        draft_accepted=4,
        drafts=(DraftPosition(drafted=4, accepted=3), DraftPosition(drafted=2, accepted=1)),
    )
    step(meter, 1, 1, grown, BackendStats())
    step(meter, 1, 1, BackendStats(), grown)
    step(meter, 1, 1, BackendStats(draft_tokens=1, drafts=(DraftPosition(drafted=1),)), BackendStats())
    usage = usage_of(meter)
    assert (usage.drafts, usage.draft_tokens, usage.draft_accepted) == (5, 7, 4)
    assert usage.held_by_position == (3, 1)


def test_how_often_was_guessed_is_unknown_where_the_backend_does_not_tell() -> None:
    meter = new_meter()
    assert usage_of(meter).drafts == 0
    step(meter, 1, 1, BackendStats(draft_tokens=5), BackendStats())
    assert usage_of(meter).drafts is None


def test_answers_asked_for_together_are_told_with_the_last_of_them() -> None:
    meter, choices = new_meter(), Choices(2)
    for tokens in (7, 3):
        finish(meter, output_tokens=tokens, choices=2, longest=choices.finish(tokens))
    histograms = usage_of(meter).histograms
    assert (histograms[CHOICES].count, histograms[CHOICES].sum) == (1, 2)
    assert (histograms[MAX_OUTPUT].count, histograms[MAX_OUTPUT].sum) == (1, 7)


def test_a_model_that_is_loaded_again_goes_on_counting() -> None:
    meter = new_meter()
    meter.count_prefill(1.0, "m", 10, 4, 0.1)
    meter.add_model("m", 50)
    meter.count_prefill(2.0, "m", 10, 0, 0.1)
    usage = usage_of(meter)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (20, 4, 16)
