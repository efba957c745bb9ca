"""The torch backend with real (tiny) models: the same request gives the same tokens however it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import SamplingParams
from tests.integration.torch_backend.running import GREEDY, PARAMS, SEEDED, TOKENS, Run, alone, ask, load, prompt


@PARAMS
def test_a_batch_gives_each_request_what_it_gets_alone(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 5 + 7 * salt), params) for salt in range(5)]
    together = Run(load(model), *requests).to_end()
    assert together == {request.id: alone(model, request) for request in requests}


@PARAMS
def test_a_prompt_in_chunks_gives_what_it_gives_whole(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 50 + salt), params) for salt in range(3)]
    chunked = Run(load(model, step_tokens=16), *requests).to_end()
    assert chunked == {request.id: alone(model, request) for request in requests}


@PARAMS
def test_a_prefix_hit_gives_what_a_computed_prompt_gives(model: Path, params: SamplingParams) -> None:
    backend = load(model)
    first = Run(backend, ask("first", prompt(1, 45), params))
    expected = first.to_end()["first"]
    again = Run(backend, ask("again", prompt(1, 45), params))
    assert again.to_end()["again"] == expected
    assert first.cached == {"first": 0}
    assert again.cached == {"again": 40}
    longer = ask("longer", [*prompt(1, 45), *expected, 9], params)
    assert Run(backend, longer).to_end()["longer"] == alone(model, longer)


@PARAMS
def test_preempted_requests_give_what_they_give_undisturbed(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 20), params) for salt in range(4)]
    backend = load(model, kv_tokens=112)
    crowded = Run(backend, *requests).to_end()
    assert backend.stats().preemptions > 0
    assert crowded == {request.id: alone(model, request) for request in requests}


@PARAMS
@pytest.mark.parametrize("had", [1, 11])
def test_a_request_resumed_elsewhere_goes_on_as_if_nothing_had_happened(
    model: Path, params: SamplingParams, had: int
) -> None:
    whole = alone(model, ask("whole", prompt(3), params))
    resumed = Run(load(model), ask("resumed", prompt(3), params, generated=whole[:had])).to_end()
    assert resumed["resumed"] == whole


def test_requests_that_come_and_go_do_not_disturb_one_that_stays(llama: Path) -> None:
    stays = ask("stays", prompt(0), SEEDED)
    expected = alone(llama, stays)
    run = Run(load(llama, kv_tokens=256, step_tokens=16), stays)
    for number in range(8):
        run.add(ask(f"passing-{number}", prompt(number, 9 + 5 * number), SEEDED))
        run.step()
        run.step()
        run.backend.cancel(f"passing-{number}")
    assert run.to_end()["stays"] == expected


def test_different_knobs_side_by_side_do_not_mix(llama: Path) -> None:
    knobs = [
        GREEDY,
        SEEDED,
        SamplingParams(seed=1, top_k=5, logprobs=3),
        SamplingParams(seed=2, min_p=0.1, min_tokens=10),
        SamplingParams(temperature=0, logit_bias={7: 100.0}),
    ]
    requests = [ask(str(number), prompt(number), params) for number, params in enumerate(knobs)]
    together = Run(load(llama), *requests).to_end()
    assert together == {request.id: alone(llama, request) for request in requests}
    assert together["4"] == [7] * TOKENS
