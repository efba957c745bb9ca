"""Two models side by side: what differs is said in a word, and by how much."""

from __future__ import annotations

import msgspec

from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.tui.screens.models.comparison import Line, Side, compare
from console.tui.screens.models.load_form import LoadForm
from engine.models.catalog import ModelEntry
from engine.placement.estimate import Estimate
from tests.fakes import estimates
from tests.fakes.link import MODELS

DEFAULTS = LoadOptions(num_workers=2, max_prompts=8, cache_bits=16, dtype="auto")


def side(entry: ModelEntry, fit: Estimate | str | None = None, own: LoadOptions = NO_OPTIONS) -> Side:
    return Side(LoadForm(entry, own, DEFAULTS), fit)


def lines(left: Side, right: Side) -> dict[str, Line]:
    return {line.label: line for line in compare(left, right)}


def test_a_model_differs_from_itself_in_nothing() -> None:
    one = side(MODELS[1], estimates.estimate())
    assert [line.difference for line in compare(one, one) if line.difference] == []


def test_what_differs_says_so_and_how_many_times() -> None:
    found = lines(side(MODELS[0]), side(MODELS[1]))
    assert found["architecture"] == Line("architecture", "Llama", "Mistral", "differs")
    assert found["context"] == Line("context", "1,024", "8,192", "differs, × 8.00")
    assert found["parameters"].difference == "differs, × 862"
    assert found["backend"].difference == ""


def test_the_values_of_the_loads_are_compared() -> None:
    found = lines(side(MODELS[1]), side(MODELS[1], own=LoadOptions(cache_bits=8)))
    assert (found["load: KV bits"].left, found["load: KV bits"].right) == ("16", "8")
    assert found["load: KV bits"].difference == "differs"
    assert found["load: workers"].difference == ""


def test_the_fit_of_each_is_compared_device_by_device() -> None:
    found = lines(side(MODELS[1], estimates.estimate()), side(MODELS[1], estimates.estimate_that_lacks()))
    assert (found["fit"].left, found["fit"].right) == ("✓ fits", "✖ does not fit")
    assert found["GPU1 left"] == Line("GPU1 left", "✓ 5.6 GiB", "✖ lacks 2,310 MiB", "differs")
    assert found["GPU0 needs"].difference == ""


def test_a_fit_that_is_not_known_yet_is_no_difference() -> None:
    found = lines(side(MODELS[1], estimates.estimate()), side(MODELS[1]))
    assert (found["fit"].right, found["fit"].difference) == ("◌ …", "")
    assert found["GPU0 left"].difference == ""


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    broken = msgspec.structs.replace(MODELS[2], problem="pickles")
    found = lines(side(MODELS[1]), side(broken, "pickles"))
    assert found["problem"] == Line("problem", "none", "pickles", "differs")
