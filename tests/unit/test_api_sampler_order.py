"""Orders of samplers as clients send them: honoured where they come to ours, refused where they do not."""

from __future__ import annotations

import pytest

from console.api.requests.sampler_order import apply_sampler_order
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from tests.fakes.sampler_orders import KOBOLD_ORDER, OOBA_ORDER


def test_kobold_s_own_order_puts_the_temperature_last() -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.1)
    assert apply_sampler_order(params, KOBOLD_ORDER, "sampler_order").temperature_last


def test_text_generation_webui_s_own_order_puts_the_temperature_first_unless_it_is_to_be_last() -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.5)
    assert not apply_sampler_order(params, OOBA_ORDER, "sampler_priority").temperature_last
    last = SamplingParams(temperature=0.7, top_k=40, top_p=0.5, temperature_last=True)
    assert apply_sampler_order(last, OOBA_ORDER, "sampler_priority").temperature_last


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=5, top_p=0.5, tfs=0.9, repetition_penalty=1.3),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.5),
    ],
    ids=["neutral", "greedy", "temperature alone", "one filter alone"],
)
def test_an_order_of_what_is_not_used_changes_nothing(params: SamplingParams) -> None:
    assert apply_sampler_order(params, [5, 4, 3, 2, 1, 0, 6], "sampler_order") == params


@pytest.mark.parametrize(
    ("params", "order"),
    [
        (SamplingParams(temperature=0.7, top_k=5, top_p=0.5), [0, 5, 2]),
        (SamplingParams(tfs=0.9, top_p=0.5), KOBOLD_ORDER),
        (SamplingParams(top_p=0.5, repetition_penalty=1.1), [2, 6]),
        (SamplingParams(temperature=0.7, repetition_penalty=1.1), [5, 6]),
        (SamplingParams(min_p=0.1, max_temp=2.0), ["dynamic_temperature", "min_p"]),
    ],
)
def test_an_order_that_is_not_ours_is_refused_by_name(params: SamplingParams, order: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="sampler_order puts ") as refused:
        apply_sampler_order(params, order, "sampler_order")
    assert refused.value.details["param"] == "sampler_order"


@pytest.mark.parametrize("order", [[7], [True], ["smoke"], 5, [None]])
def test_what_is_no_order_is_refused(order: object) -> None:
    with pytest.raises(InvalidRequest, match="sampler_order"):
        apply_sampler_order(SamplingParams(), order, "sampler_order")
