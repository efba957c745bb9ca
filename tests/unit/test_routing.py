"""What a worker's step costs, what it holds, and which worker is the cheapest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import BackendStats, PrefixChanges
from engine.scheduling.routing import (
    SLOW_FOR_S,
    Offer,
    PrefixMemory,
    Router,
    Slot,
    StepCost,
    StepPrice,
    choose_worker,
)
from engine.worker_process.protocol import StepBatch
from tests.fakes.requests import make_request

PRICE = StepPrice(fixed_s=0.01, prompt_token_s=0.001, answer_s=0.002)


def offer(active: int = 0, *, cached: int = 0, pending: int = 0, price: StepPrice = PRICE) -> Offer:
    slot = Slot(worker=f"{active}/{cached}/{pending}", active=active, max_prompts=100)
    return Offer(slot=slot, cached_tokens=cached, pending_tokens=pending, price=price)


# --- the choice ----------------------------------------------------------------------------------------------------


def test_of_equal_workers_the_first_is_chosen() -> None:
    offers = [offer(1), offer(1)]
    assert choose_worker(offers, 10, 10) is offers[0]


def test_a_worker_that_holds_more_of_the_prompt_is_cheaper() -> None:
    assert choose_worker([offer(), offer(cached=512)], 600, 100).cached_tokens == 512


@pytest.mark.parametrize(("answer_tokens", "tolerated"), [(10, 51), (100, 5), (1000, 0)])
def test_a_prefix_outweighs_a_crowd_as_long_as_it_saves_more_than_that_costs(
    answer_tokens: int, tolerated: int
) -> None:
    """512 tokens of 1 ms, once for the request and once for whoever comes after it; 2 ms a step for each neighbour."""
    holder = next(
        active
        for active in range(100)
        if choose_worker([offer(), offer(active + 1, cached=512)], 600, answer_tokens).cached_tokens == 0
    )
    assert holder == tolerated


def test_prompts_that_wait_there_outweigh_a_short_prefix() -> None:
    assert choose_worker([offer(), offer(cached=64, pending=127)], 100, 10).cached_tokens == 64
    assert choose_worker([offer(), offer(cached=64, pending=129)], 100, 10).cached_tokens == 0


def test_a_faster_worker_takes_more() -> None:
    slow = StepPrice(fixed_s=0.05, prompt_token_s=0.01, answer_s=0.01)
    fast = offer(3)
    assert choose_worker([offer(0, price=slow), fast], 100, 100) is fast


# --- measured cost -------------------------------------------------------------------------------------------------

prices = st.builds(StepPrice, st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-4, 1e-2))


@given(prices, st.lists(st.tuples(st.integers(0, 512), st.integers(0, 16)), min_size=60, max_size=60))
def test_prices_are_found_from_steps_that_differ(price: StepPrice, steps: list[tuple[int, int]]) -> None:
    steps += [(0, 1), (512, 0), (0, 16), (256, 8)] * 5
    cost = StepCost()
    for prompt_tokens, answers in steps:
        seconds = price.fixed_s + prompt_tokens * price.prompt_token_s + answers * price.answer_s
        cost.observe(seconds, prompt_tokens, answers)
    for prompt_tokens, answers in ((512, 0), (0, 16), (256, 4)):
        expected_s = price.fixed_s + prompt_tokens * price.prompt_token_s + answers * price.answer_s
        found = cost.price
        found_s = found.fixed_s + prompt_tokens * found.prompt_token_s + answers * found.answer_s
        assert found_s == pytest.approx(expected_s, rel=0.1)


def test_what_was_never_seen_keeps_a_sensible_price() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(0.02, 0, 1)
    assert cost.price.prompt_token_s == pytest.approx(StepPrice().prompt_token_s, rel=0.01)
    assert cost.price.fixed_s + cost.price.answer_s == pytest.approx(0.02, rel=0.01)


def test_a_worker_that_became_slower_is_found_out() -> None:
    cost = StepCost()
    for _ in range(200):
        cost.observe(0.02, 0, 1)
    for _ in range(200):
        cost.observe(0.2, 0, 1)
    assert cost.price.fixed_s + cost.price.answer_s == pytest.approx(0.2, rel=0.1)


def test_one_step_that_hung_changes_little() -> None:
    cost = StepCost()
    for step in range(100):
        cost.observe(30.0 if step == 60 else 0.02, 0, 1)
    assert cost.price.fixed_s + cost.price.answer_s == pytest.approx(0.02, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6), st.integers(0, 4096)), max_size=50))
def test_prices_are_never_negative(steps: list[tuple[float, int, int]]) -> None:
    cost = StepCost()
    for seconds, prompt_tokens, answers in steps:
        cost.observe(seconds, prompt_tokens, answers)
    assert min(cost.price.fixed_s, cost.price.prompt_token_s, cost.price.answer_s) >= 0


# --- what a worker holds -------------------------------------------------------------------------------------------


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def test_a_prefix_is_held_up_to_the_first_missing_page() -> None:
    memory = PrefixMemory()
    memory.update(PrefixChanges(added=tuple(keys(1, 2, 4))))
    assert [memory.match(keys(*pages)) for pages in ([1, 2, 3, 4], [2], [3], [])] == [2, 1, 0, 0]


def test_what_was_sent_counts_until_it_is_reported_as_dropped() -> None:
    memory = PrefixMemory()
    memory.add(keys(1, 2, 3))
    memory.update(PrefixChanges(dropped=tuple(keys(3))))
    assert memory.match(keys(1, 2, 3)) == 2


def test_the_ends_of_prompts_sent_longest_ago_are_forgotten_first() -> None:
    memory = PrefixMemory(capacity=4)
    memory.add(keys(1, 2, 3))
    memory.add(keys(1, 4))
    memory.add(keys(5))
    assert [memory.match(keys(*pages)) for pages in ([1, 2, 3], [1, 4], [5])] == [2, 2, 1]


# --- slow workers --------------------------------------------------------------------------------------------------

GPUS = {f"w{index}": [f"cuda:{index}"] for index in range(4)}


class Fleet:
    """Workers that each work on a request, and report a step once a second."""

    def __init__(self, devices: dict[str, list[str]]) -> None:
        self.router = Router(16, b"")
        self.now = 0.0
        self.devices = devices
        slots = [Slot(worker=name, active=0, max_prompts=1) for name in devices]
        for slot in slots:
            request = make_request()
            self.router.send(request, self.router.fit(request, [slot]))

    def pass_time(self, seconds: float, **step_s: float) -> None:
        """step_s: of each worker."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for name, took_s in step_s.items():
                for _ in range(8):
                    batch = StepBatch(outputs=[], stats=BackendStats(), steps=1, step_s=took_s, answers=1)
                    self.router.stepped(name, batch)
            self.router.compare(self.devices, self.now)

    def slow(self) -> set[str]:
        """Those that are."""
        return {name for name in self.devices if self.router.slowness(name) > 1.0}


def test_a_worker_is_slow_once_its_steps_took_longer_than_its_peers_for_a_while() -> None:
    fleet = Fleet({name: GPUS[name] for name in ("w0", "w1")})
    fleet.pass_time(SLOW_FOR_S, w0=0.02, w1=0.08)
    assert fleet.slow() == set()
    fleet.pass_time(10, w0=0.02, w1=0.08)
    assert fleet.slow() == {"w1"}
    assert fleet.router.slowness("w1") == pytest.approx(4.0, rel=0.05)
    before_s = fleet.router.slow_s("w1", fleet.now)
    fleet.pass_time(20, w0=0.02, w1=0.08)
    assert fleet.router.slow_s("w1", fleet.now) - before_s == pytest.approx(15.0, rel=0.05)
    fleet.pass_time(20, w0=0.02, w1=0.02)
    assert fleet.slow() == set()
    assert fleet.router.slow_s("w0", fleet.now) == 0.0


def test_equal_workers_that_are_slow_in_turn_are_never_slow_ones() -> None:
    fleet = Fleet({name: GPUS[name] for name in ("w0", "w1")})
    for _ in range(10):
        fleet.pass_time(6, w0=0.02, w1=0.06)
        fleet.pass_time(6, w0=0.06, w1=0.02)
        assert fleet.slow() == set()


def test_workers_that_share_a_processor_slow_each_other_and_none_is_to_blame() -> None:
    for shared in (["cpu"], ["cuda:0"]):
        fleet = Fleet({"w0": shared, "w1": shared})
        fleet.pass_time(60, w0=0.02, w1=0.08)
        assert fleet.slow() == set()
    simulated = Fleet({"w0": ["sim:0"], "w1": ["sim:1"]})
    simulated.pass_time(60, w0=0.02, w1=0.08)
    assert simulated.slow() == set()
    nodes = Fleet({"w0": ["node1/cpu"], "w1": ["node2/cpu"]})
    nodes.pass_time(60, w0=0.02, w1=0.08)
    assert nodes.slow() == {"w1"}


def test_where_as_many_workers_are_slow_as_are_not_no_single_one_is_to_blame() -> None:
    fleet = Fleet(GPUS)
    fleet.pass_time(60, w0=0.02, w1=0.02, w2=0.08, w3=0.08)
    assert fleet.slow() == set()
    fleet.pass_time(60, w0=0.02, w1=0.02, w2=0.02, w3=0.08)
    assert fleet.slow() == {"w3"}


def test_a_worker_on_another_kind_of_device_is_no_peer() -> None:
    fleet = Fleet({"w0": ["cuda:0"], "w1": ["cpu"]})
    fleet.pass_time(60, w0=0.02, w1=0.5)
    assert fleet.slow() == set()
