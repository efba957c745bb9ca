"""What is typed and chosen in the form of autotune becomes an order, or is refused where it was typed."""

from __future__ import annotations

import pytest

from console.link.tuning import TuneOrder
from console.tui.screens.tune.autotune_draft import FORM, KNOBS, TuneDraft
from engine.errors import InvalidRequest


def draft(**typed: str) -> TuneDraft:
    found = TuneDraft()
    for field in FORM.fields:
        if field.name in typed:
            found.typed.type(FORM, field, typed[field.name])
    return found


def test_untouched_it_is_the_usual_order() -> None:
    assert draft().order("m") == TuneOrder(model="m")


def test_all_of_it_is_in_the_order() -> None:
    found = draft(
        minutes="2.5",
        slo_ttft_s="500ms",
        slo_itl_s="0.05",
        percentile="99",
        users=" 8 ",
        prompt="64-256",
        output="normal:64:16",
    )
    found.switch("threads")
    found.switch("cache_bits")
    assert found.order("") == TuneOrder(
        minutes=2.5,
        slo_ttft_s=0.5,
        slo_itl_s=0.05,
        percentile=99,
        users=8,
        prompt="64-256",
        output="normal:64:16",
        fixed=("threads", "cache_bits"),
    )
    found.switch("threads")
    assert found.order("").fixed == ("cache_bits",)


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("minutes", "", "nothing is not a number from 0.05 to 1440"),
        ("minutes", "soon", "soon is not a number from 0.05 to 1440"),
        ("percentile", "100", "100 is not a number from 1 to 99.9"),
        ("users", "0", "0 is not a number from 1 to 10000"),
        ("users", "1.5", "1.5 is not a whole number"),
        ("slo_ttft_s", "0", "0 is not a duration; examples: 500ms, 0.5s"),
        ("slo_itl_s", "-5ms", "-5ms is not a duration"),
    ],
)
def test_what_cannot_be_ordered_is_refused_where_it_was_typed(name: str, typed: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        draft(**{name: typed}).order("")
    assert refused.value.details["param"] == name


def test_with_no_knob_left_there_is_nothing_to_begin() -> None:
    found = draft()
    for knob in KNOBS:
        found.switch(knob)
    with pytest.raises(InvalidRequest, match="No knob selected"):
        found.order("")
