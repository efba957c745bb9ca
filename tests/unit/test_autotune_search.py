"""The search for the best setting: what it finds on simulated devices, and in what time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.tuning.autotune.record import Sample, Slice, pareto
from console.tuning.autotune.search import Search
from console.tuning.autotune.space import Setting, Space
from engine.metrics.slo import Slo
from tests.fakes.simulated_tuning import DEVICES, Device, Noise, knobs, run

pytestmark = pytest.mark.long

RUNS = 10
NEAR = 0.95
TELLABLE = 0.02
"""What no measurement of a latency can tell apart."""


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_it_finds_a_setting_within_a_twentieth_of_the_grids_best_in_a_quarter_of_its_time(device: Device) -> None:
    best, grid_s, found = device.best(), device.grid_s(), 0
    for seed in range(RUNS):
        search, setting = run(device, seed, grid_s / 4)
        truth = device.truth(setting)
        assert search.spent_s <= grid_s / 4
        found += truth.keeps(device.slo, TELLABLE) and truth.tokens_per_s >= NEAR * best.tokens_per_s
    assert found >= 9


def test_it_ends_by_itself_where_time_is_left() -> None:
    search, _ = run(DEVICES[5], 1, 1e6)
    assert search.propose() is None
    assert search.spent_s < DEVICES[5].grid_s()


def test_the_same_seed_tries_the_same() -> None:
    first, second = run(DEVICES[0], 3, 300)[0], run(DEVICES[0], 3, 300)[0]
    assert [each.setting for each in first.records] == [each.setting for each in second.records]


def test_it_begins_with_what_is_in_use() -> None:
    start = Setting(max_prompts=4)
    search = Search(Space(knobs=knobs(max_prompts=(1, 2, 4, 8)), start=start), Slo(), budget_s=60)
    assert (trial := search.propose()) is not None and trial.setting == start


def test_what_was_proposed_is_proposed_until_it_is_told_of() -> None:
    search = Search(Space(knobs=knobs(max_prompts=(1, 2)), start=Setting(max_prompts=1)), Slo(), budget_s=60)
    assert search.propose() is search.propose()


def test_nothing_is_proposed_that_takes_longer_than_is_left() -> None:
    search = Search(Space(knobs=knobs(max_prompts=(1, 2)), start=Setting(max_prompts=1)), Slo(), budget_s=4.0)
    assert search.propose() is None
    assert search.best() is None


def test_what_needs_no_less_memory_than_a_setting_that_did_not_fit_is_never_tried() -> None:
    device, tried, refused = replace(DEVICES[0], memory=60), [], []
    search = Search(device.space, device.slo, budget_s=1000)
    noise = Noise(1)
    while (trial := search.propose()) is not None:
        tried.append(trial.setting)
        assert not any(trial.setting.asks_no_less_memory_than(each) for each in refused)
        if device.fits(trial.setting):
            search.observe(trial, noise.window(device, trial.setting, trial.seconds))
        else:
            refused.append(trial.setting)
            search.refuse(trial)
    assert refused
    assert len(tried) > len(refused)


def test_more_prompts_than_surely_break_the_itl_are_never_tried() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2, 4, 8, 16, 32)), start=Setting(max_prompts=1))
    search = Search(space, Slo(itl_s=0.010), budget_s=200)
    tried = []
    while (trial := search.propose()) is not None:
        tried.append(trial.setting.max_prompts)
        search.observe(trial, steady(trial.setting.max_prompts * 10, itl_s=0.002 * trial.setting.max_prompts))
    best = search.best()
    assert best is not None and best.setting.max_prompts == 4
    assert 32 not in tried or tried.index(32) < tried.index(16)
    assert tried.count(32) <= 1


def test_where_nothing_keeps_the_slo_the_closest_to_it_is_the_best() -> None:
    device = replace(DEVICES[0], slo=Slo(itl_s=0.001))
    search, setting = run(device, 1, 400)
    best = search.best()
    assert best is not None and best.verdict == "broken"
    assert setting.max_prompts == 1


def test_a_refusal_of_everything_ends_the_search() -> None:
    search = Search(DEVICES[0].space, DEVICES[0].slo, budget_s=1000)
    refusals = 0
    while (trial := search.propose()) is not None:
        search.refuse(trial)
        refusals += 1
    assert search.best() is None
    assert refusals < DEVICES[0].space.size


def test_a_setting_that_fits_no_more_when_it_is_measured_again_is_given_up() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2, 4, 8)), start=Setting(max_prompts=1))
    search, seen = Search(space, Slo(), budget_s=1000), set()
    while (trial := search.propose()) is not None:
        if trial.setting.max_prompts == 8 and trial.setting in seen:
            search.refuse(trial)
            continue
        seen.add(trial.setting)
        rates = (90, 110) if trial.setting.max_prompts >= 4 else (9, 11)
        search.observe(trial, Sample(slices=tuple(Slice(seconds=1.0, tokens=rate) for rate in rates)))
    best = search.best()
    assert best is not None and best.setting.max_prompts < 8


def test_of_two_as_fast_the_one_with_more_goodput_is_the_best() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2)), start=Setting(max_prompts=1))
    search = Search(space, Slo(), budget_s=1000)
    while (trial := search.propose()) is not None:
        search.observe(trial, steady(100, kept=5 * trial.setting.max_prompts))
    best = search.best()
    assert best is not None and best.setting.max_prompts == 2


def test_a_setting_that_is_not_known_is_looked_at_before_alike_ones_are_measured_a_third_time() -> None:
    space = Space(knobs=knobs(max_prompts=(1, 2, 4, 8, 16, 32, 64)), start=Setting(max_prompts=8))
    search, tried = Search(space, Slo(), budget_s=1000), []
    while (trial := search.propose()) is not None:
        tried.append(trial.setting)
        search.observe(trial, steady(100))
    third = next((place for place, each in enumerate(tried) if tried[:place].count(each) == 2), len(tried))
    assert len(set(tried[:third])) == space.size


def test_a_dear_turn_that_promised_too_little_elsewhere_is_not_made() -> None:
    space = Space(knobs=knobs(workers=(1, 2), max_prompts=(1, 2, 4, 8, 16, 32, 64)), start=Setting(max_prompts=8))
    search, tried = Search(space, Slo(), budget_s=1000, window_s=2.0), []
    while (trial := search.propose()) is not None:
        tried.append(trial.setting)
        search.observe(trial, steady(100 * trial.setting.max_prompts * (4 if trial.setting.workers == 2 else 1)))
    turned = next(place for place, each in enumerate(tried) if each.workers == 2)
    assert all(each.workers == 2 for each in tried[turned:])
    best = search.best()
    assert best is not None and best.setting == Setting(workers=2, max_prompts=64)


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    search, _ = run(DEVICES[0], 1, 500)
    front = pareto(search.records, Slo(itl_s=1.0))
    for record in front:
        assert not any(
            other.tokens_per_s.value > record.tokens_per_s.value and other.itl_s.value <= record.itl_s.value
            for other in search.records
            if other.itl_s is not None and record.itl_s is not None
        )
    assert 1 < len(front) < len(search.records)


def steady(tokens: int, *, itl_s: float = 0.01, kept: int = 0) -> Sample:
    """Four slices that are all alike."""
    return Sample(slices=(Slice(seconds=1.0, tokens=tokens, itl_s=(itl_s,) * 5, judged=kept, met_slo=kept),) * 4)
