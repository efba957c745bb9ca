"""Which waiting request goes to which worker."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.dispatcher import PREFIX_CHUNK_TOKENS, Dispatcher, PrefixMemory, Slot, choose, prefix_hashes
from engine.request import Request
from engine.stream import RequestStream

_orders = count()


def request(prompt: list[int] | None = None, *, priority: int = 0) -> Request:
    order = next(_orders)
    return Request(
        id=f"r{order}",
        source="test",
        priority=priority,
        order=order,
        prompt_ids=prompt or [order],
        params=SamplingParams(),
        end_token_ids=(),
        timeout_s=0,
        created=0.0,
        stream=RequestStream(f"r{order}", 1, lambda: None),
    )


def slots(*active: int, max_prompts: int = 4) -> list[Slot]:
    return [Slot(worker=f"w{i}", active=number, max_prompts=max_prompts) for i, number in enumerate(active)]


def queued(*requests: Request) -> Dispatcher:
    dispatcher = Dispatcher()
    for each in requests:
        dispatcher.add(each)
    return dispatcher


def test_equal_requests_go_in_the_order_of_their_arrival() -> None:
    first, second, third = (request() for _ in range(3))
    assigned = queued(second, third, first).assign(slots(0))
    assert [each for each, _ in assigned] == [first, second, third]


def test_a_higher_priority_goes_first() -> None:
    low, high = request(priority=0), request(priority=5)
    assert [each for each, _ in queued(low, high).assign(slots(0))] == [high, low]


def test_a_request_that_lost_its_worker_goes_to_the_head_of_the_queue() -> None:
    lost, waiting = request(), request()
    dispatcher = queued(lost)
    dispatcher.assign(slots(0))
    dispatcher.add(waiting)
    dispatcher.add(lost)
    assert dispatcher.assign(slots(0))[0][0] is lost


def test_no_worker_gets_more_than_max_prompts_and_the_rest_stays_queued() -> None:
    dispatcher = queued(*(request() for _ in range(10)))
    assigned = dispatcher.assign(slots(3, 1))
    assert sorted(worker for _, worker in assigned) == ["w0", "w1", "w1", "w1"]
    assert len(dispatcher) == 6


def test_a_worker_with_more_than_it_may_have_gets_nothing() -> None:
    assert queued(request()).assign(slots(7)) == []


def test_requests_spread_to_the_least_loaded_worker() -> None:
    assert [worker for _, worker in queued(request()).assign(slots(2, 1, 3))] == ["w1"]


def test_a_suspect_waits_for_an_empty_worker_and_fills_it() -> None:
    suspect, other = request(), request()
    suspect.deaths = 2
    dispatcher = queued(suspect, other)
    assert dispatcher.assign(slots(1)) == []
    assert dispatcher.assign(slots(0)) == [(suspect, "w0")]
    assert dispatcher.assign(slots(1)) == [(other, "w0")]


def test_a_removed_request_is_not_assigned() -> None:
    gone, kept = request(), request()
    dispatcher = queued(gone, kept)
    dispatcher.remove(gone)
    assert len(dispatcher) == 1
    assert [each for each, _ in dispatcher.assign(slots(0))] == [kept]


def test_a_prompt_goes_to_the_worker_that_holds_its_prefix() -> None:
    prefix = list(range(PREFIX_CHUNK_TOKENS * 2))
    dispatcher = queued(request([*prefix, 1]))
    [(_, holder)] = dispatcher.assign(slots(0, 0))
    dispatcher.add(request([*prefix, 2]))
    loads = {"w0": 0, "w1": 0, holder: 1}
    assert [worker for _, worker in dispatcher.assign(slots(loads["w0"], loads["w1"]))] == [holder]


def test_a_much_busier_holder_of_the_prefix_does_not_get_it() -> None:
    busy, idle = slots(3, 0)
    assert choose([busy, idle], [9, 0]) is idle


def test_a_forgotten_worker_holds_no_prefix() -> None:
    prefix = list(range(PREFIX_CHUNK_TOKENS))
    dispatcher = queued(request(prefix))
    [(_, holder)] = dispatcher.assign(slots(0, 0))
    dispatcher.forget_worker(holder)
    dispatcher.add(request(prefix))
    loads = {"w0": 0, "w1": 0, holder: 1}
    assert [worker for _, worker in dispatcher.assign(slots(loads["w0"], loads["w1"]))] != [holder]


def test_prefix_hashes_stand_for_everything_before_them() -> None:
    chunk = list(range(PREFIX_CHUNK_TOKENS))
    other = [999, *chunk[1:]]
    assert prefix_hashes(chunk[:-1]) == []
    assert prefix_hashes([*chunk, *chunk])[0] == prefix_hashes(chunk)[0]
    assert prefix_hashes([*other, *chunk])[1] != prefix_hashes([*chunk, *chunk])[1]


def test_prefix_memory_forgets_the_least_recently_used() -> None:
    memory = PrefixMemory(capacity=2)
    memory.remember([1, 2])
    memory.remember([1])
    memory.remember([3])
    assert (memory.match([1]), memory.match([2]), memory.match([3])) == (1, 0, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.lists(st.integers(0, 5), max_size=4))
def test_every_request_is_assigned_exactly_once_or_still_waits(
    arrivals: list[tuple[int, bool]], active: list[int]
) -> None:
    dispatcher = Dispatcher()
    waiting: set[int] = set()
    for priority, removed in arrivals:
        each = request(priority=priority)
        dispatcher.add(each)
        if removed:
            dispatcher.remove(each)
        else:
            waiting.add(each.order)
    places = slots(*active)
    free = sum(slot.free for slot in places)
    assigned = [each.order for each, _ in dispatcher.assign(places)]
    assert len(assigned) == len(set(assigned)) == min(free, len(waiting))
    assert set(assigned) <= waiting
    assert len(dispatcher) == len(waiting) - len(assigned)
