"""What is let in, and what its open settings come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.base import LoadedModel
from engine.config import ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.requests.admission import end_tokens, resolve_params, resolve_timeout


def resolve(
    prompt_tokens: int, params: SamplingParams | None = None, *, max_input_len: int | None = None, kv_tokens: int = 1000
) -> SamplingParams:
    model = LoadedModel(
        backend="fake",
        architecture="F",
        dtype="float32",
        devices=("cpu",),
        vocab_size=50,
        max_model_len=100,
        kv_tokens=kv_tokens,
        page_tokens=16,
        weights_bytes=0,
        kv_bytes=0,
        parameters=0,
    )
    spec = ModelSpec(path=Path("/m"), name="m", max_input_len=max_input_len)
    return resolve_params([1] * prompt_tokens, params or SamplingParams(), spec, model, seed=77)


def test_open_settings_are_resolved() -> None:
    resolved = resolve(40)
    assert (resolved.max_tokens, resolved.seed) == (60, 77)


def test_given_settings_stay() -> None:
    resolved = resolve(40, SamplingParams(max_tokens=5, seed=3, temperature=0.25))
    assert (resolved.max_tokens, resolved.seed, resolved.temperature) == (5, 3, 0.25)


def test_a_max_tokens_beyond_the_context_is_cut_to_the_room() -> None:
    resolved = resolve(90, SamplingParams(max_tokens=128, min_tokens=50))
    assert (resolved.max_tokens, resolved.min_tokens) == (10, 10)


def test_the_answer_fits_the_kv_pages_too() -> None:
    assert resolve(40, kv_tokens=64).max_tokens == 24


@pytest.mark.parametrize(
    ("prompt_tokens", "limits", "limit"),
    [(100, {}, 99), (64, {"kv_tokens": 64}, 63), (11, {"max_input_len": 10}, 10)],
)
def test_a_prompt_that_cannot_fit_is_refused_with_numbers(
    prompt_tokens: int, limits: dict[str, int], limit: int
) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        resolve(prompt_tokens, SamplingParams(max_tokens=7), **limits)  # type: ignore[arg-type]
    numbers = {"prompt_tokens": prompt_tokens, "limit": limit, "max_model_len": 100, "max_tokens": 7}
    assert refused.value.details == {"param": "prompt", **numbers}
    assert str(prompt_tokens) in refused.value.message
    assert str(next(iter(limits.values()), 100)) in refused.value.message


def test_a_negative_prompt_that_cannot_fit_is_named() -> None:
    with pytest.raises(ContextLengthExceeded, match="the negative prompt has 100 tokens") as refused:
        resolve(3, SamplingParams(negative_prompt_ids=(1,) * 100, cfg_scale=2.0))
    assert refused.value.details["param"] == "negative_prompt"


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    assert resolve(99).max_tokens == 1


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        resolve(0)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(stop_token_ids=(50,)), "stop_token_ids"),
        (SamplingParams(logit_bias={51: 1.0}), "logit_bias"),
    ],
)
def test_a_bad_setting_is_refused_by_name(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(3, params)
    assert refused.value.details["param"] == field


def test_end_tokens_are_the_models_and_the_requests() -> None:
    assert end_tokens(SamplingParams(stop_token_ids=(9, 2)), (2, 3)) == (2, 3, 9)
    assert end_tokens(SamplingParams(stop_token_ids=(9,), ignore_eos=True), (2, 3)) == (9,)


def test_timeouts_default_and_zero_means_none() -> None:
    assert (resolve_timeout(None, 600.0), resolve_timeout(0, 600.0), resolve_timeout(2.5, 600.0)) == (600.0, 0, 2.5)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_a_senseless_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        resolve_timeout(timeout_s, 600.0)
