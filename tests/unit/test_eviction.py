"""Which models leave memory for another: those whose next load costs least."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest

from engine.models.eviction import MAX_EXACT, Candidate, choose_victims
from engine.models.residency import HALF_LIFE_S, Demand


def model(key: str, *, load_s: float = 10.0, demand: float = 1.0, size: int = 1) -> Candidate:
    return Candidate(key=key, load_s=load_s, demand=demand, size_bytes=size)


def frees(needed: int, candidates: Collection[Candidate]):  # type: ignore[no-untyped-def]
    sizes = {each.key: each.size_bytes for each in candidates}
    return lambda keys: sum(sizes[key] for key in keys) >= needed


def keys(chosen: Collection[Candidate] | None) -> set[str] | None:
    return None if chosen is None else {each.key for each in chosen}


def test_nothing_leaves_where_there_is_room() -> None:
    assert choose_victims([model("a")], lambda _: True) == ()


def test_nothing_leaves_where_all_of_it_would_not_do() -> None:
    candidates = [model("a"), model("b")]
    assert choose_victims(candidates, frees(3, candidates)) is None


def test_the_model_that_nobody_used_lately_leaves() -> None:
    candidates = [model("busy", demand=9), model("idle", demand=0), model("used", demand=1)]
    assert keys(choose_victims(candidates, frees(1, candidates))) == {"idle"}


def test_of_equally_used_models_the_one_that_loads_quickest_leaves() -> None:
    candidates = [model("slow", load_s=60), model("quick", load_s=2)]
    assert keys(choose_victims(candidates, frees(1, candidates))) == {"quick"}


def test_one_large_model_leaves_rather_than_several_that_cost_more_together() -> None:
    candidates = [model("large", load_s=20, size=4), *(model(f"small {n}", load_s=6, size=1) for n in range(4))]
    assert keys(choose_victims(candidates, frees(4, candidates))) == {"large"}


@pytest.mark.parametrize("seed", range(20))
def test_of_many_models_none_leaves_that_need_not(seed: int) -> None:
    random = Random(seed)
    candidates = [
        model(str(n), load_s=random.uniform(1, 60), demand=random.uniform(0, 9), size=random.randint(1, 20))
        for n in range(MAX_EXACT + 6)
    ]
    needed = random.randint(1, sum(each.size_bytes for each in candidates))
    fits = frees(needed, candidates)
    chosen = choose_victims(candidates, fits)
    assert chosen is not None
    assert fits([each.key for each in chosen])
    for left_out in chosen:
        assert not fits([each.key for each in chosen if each is not left_out])


@pytest.mark.parametrize("seed", range(20))
def test_of_few_models_the_set_is_the_cheapest_there_is(seed: int) -> None:
    random = Random(seed)
    candidates = [
        model(str(n), load_s=random.uniform(1, 60), demand=random.uniform(0, 9), size=random.randint(1, 20))
        for n in range(MAX_EXACT)
    ]
    fits = frees(sum(each.size_bytes for each in candidates) // 2, candidates)
    chosen = choose_victims(candidates, fits)
    assert chosen is not None
    subsets = [[each for i, each in enumerate(candidates) if bits >> i & 1] for bits in range(2 ** len(candidates))]
    cheapest = min(sum(each.loss for each in subset) for subset in subsets if fits([each.key for each in subset]))
    assert sum(each.loss for each in chosen) == pytest.approx(cheapest)


def test_a_request_counts_half_after_the_half_life() -> None:
    demand = Demand()
    demand.add(0.0)
    demand.add(0.0)
    assert demand.at(HALF_LIFE_S) == pytest.approx(1.0)
